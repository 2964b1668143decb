"""GET /health/live, /health/ready and /metrics: for whoever watches over this process.

They never wait for the engine's thread, so they answer under any load.
"""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from serve.answers import Health
from serve.engine import Engine
from serve.errors import Draining, NotReady
from serve.routes.shared import answer, problems
from serve.settings import Settings


def health_routes(settings: Settings, engine: Engine) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/health/live",
        summary="Whether the process should go on",
        response_model=Health,
        response_description="It should.",
        responses=problems(e503="The engine has stopped for good: restart the process."),
    )
    async def live() -> Response:
        if engine.dead:
            raise NotReady("the engine has stopped: restart the server")
        return answer(Health(status="live"))

    @router.get(
        "/health/ready",
        summary="Whether to send requests here",
        response_model=Health,
        response_description="Requests are welcome.",
        responses=problems(e503="Starting, shutting down, or the model does not answer."),
    )
    async def ready() -> Response:
        if engine.draining:
            raise Draining("the server is shutting down")
        if not engine.alive:
            raise NotReady("the engine is not running")
        if engine.beat_age_s > settings.stall_s:
            raise NotReady(f"one call of the model has taken {engine.beat_age_s:.1f} s")
        return answer(Health(status="ready"))

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus text format."}},
    )
    async def metrics() -> Response:
        return Response(engine.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    return router
