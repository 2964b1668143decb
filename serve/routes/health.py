"""GET /health, /health/live, /health/ready and /metrics: for whoever watches over this process.

They never wait for the engine's thread, so they answer under any load.
"""

import asyncio

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from serve.engine.engine import Engine
from serve.errors import NotReady
from serve.routes.shared import answer, problems
from serve.wire.answers import Health


def health_routes(engine: Engine) -> APIRouter:
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
        responses=problems(e503="Starting, shutting down, a model hangs, or every model fails."),
    )
    async def ready() -> Response:
        check_ready(engine)
        return answer(Health(status="ready"))

    @router.get(
        "/health",
        summary="The same as /health/ready",
        description="Where load balancers, and users of other servers, look first.",
        response_model=Health,
        response_description="Requests are welcome.",
        responses=problems(e503="Starting, shutting down, a model hangs, or every model fails."),
    )
    async def health() -> Response:
        return await ready()

    @router.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus text format."}},
    )
    async def metrics() -> Response:
        # Long enough to write that streams would be seen to halt meanwhile.
        text = await asyncio.to_thread(engine.metrics.exposition)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def check_ready(engine: Engine) -> None:
    """Raises unless some model that is served answers."""
    engine.check_open()
    served, failing = list(engine.catalog), engine.failing
    if not served:
        raise NotReady("no model is served: load one with POST /admin/models")
    if all(one.name in failing for one in served):
        names = ", ".join(failing)
        raise NotReady(f"the last call of {names} failed: it is tried again every second")
