"""GET /v2 and below, and POST /v2/repository/index: the server and its models, in the Open
Inference Protocol.

Knows metadata and readiness; deliberately nothing of inference.
"""

from typing import Any

from fastapi import APIRouter
from pydantic import RootModel
from starlette.requests import Request
from starlette.responses import Response

from serve.catalog import Served
from serve.engine.engine import Engine
from serve.errors import NotReady, ServeError, UnknownModel
from serve.routes.health import check_ready
from serve.routes.shared import answer
from serve.wire.body import checked_json, read_body
from serve.wire.oip_body import explain
from serve.wire.oip_models import metadata_of
from serve.wire.oip_schemas import (
    VERSION,
    IndexRequest,
    ModelMetadata,
    ModelReady,
    OipError,
    RepositoryEntry,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from serve.wire.reader import Reader

EXTENSIONS = ["binary_tensor_data", "parameters"]


class RepositoryIndex(RootModel[list[RepositoryEntry]]):
    """All models."""


def oip_problems(**reasons: str) -> dict[int | str, dict[str, Any]]:
    """The documentation of errors in the shape of this protocol: `oip_problems(e404="...")`."""
    return {
        int(code[1:]): {"model": OipError, "description": about} for code, about in reasons.items()
    }


_UNKNOWN = "No such model, or no such version of it, is served."
_NOT_READY = "Starting, shutting down, or a model hangs or fails."


def oip_model_routes(engine: Engine, reader: Reader) -> APIRouter:
    """The routes, for an engine."""
    router = APIRouter(tags=["open inference protocol"])

    @router.get("/v2/", include_in_schema=False)
    @router.get(
        "/v2",
        summary="This server",
        response_model=ServerMetadata,
        response_description="Its name, version and extensions.",
    )
    async def server(request: Request) -> Response:
        version = request.app.version
        return answer(ServerMetadata(name="stepdial", version=version, extensions=EXTENSIONS))

    @router.get(
        "/v2/health/live",
        summary="Whether the process should go on",
        response_model=ServerLive,
        response_description="It should.",
        responses=oip_problems(e503="The engine has stopped for good: restart the process."),
    )
    async def live() -> Response:
        if engine.dead:
            raise NotReady("the engine has stopped: restart the server")
        return answer(ServerLive(live=True))

    @router.get(
        "/v2/health/ready",
        summary="Whether to send requests here",
        response_model=ServerReady,
        response_description="Requests are welcome.",
        responses=oip_problems(e503=_NOT_READY),
    )
    async def ready() -> Response:
        check_ready(engine)
        return answer(ServerReady(ready=True))

    @router.get(
        "/v2/models/{name}/versions/{version}",
        summary="One version of a model",
        response_model=ModelMetadata,
        response_description="What it takes and gives, and its ladder.",
        responses=oip_problems(e404=_UNKNOWN),
    )
    async def model_version(name: str, version: str) -> Response:
        return answer(metadata_of(find_version(engine, name, version).manifest))

    @router.get(
        "/v2/models/{name}",
        summary="One model",
        response_model=ModelMetadata,
        response_description="What it takes and gives, and its ladder.",
        responses=oip_problems(e404=_UNKNOWN),
    )
    async def model(name: str) -> Response:
        return await model_version(name, VERSION)

    @router.get(
        "/v2/models/{name}/versions/{version}/ready",
        summary="Whether to send requests of this version of a model here",
        response_model=ModelReady,
        response_description="Requests of this model are welcome.",
        responses=oip_problems(e404=_UNKNOWN, e503=_NOT_READY),
    )
    async def version_ready(name: str, version: str) -> Response:
        served = find_version(engine, name, version)
        engine.check_open()
        _check_ready(engine, served)
        return answer(ModelReady(name=served.name, ready=True))

    @router.get(
        "/v2/models/{name}/ready",
        summary="Whether to send requests of this model here",
        response_model=ModelReady,
        response_description="Requests of this model are welcome.",
        responses=oip_problems(e404=_UNKNOWN, e503=_NOT_READY),
    )
    async def model_ready(name: str) -> Response:
        return await version_ready(name, VERSION)

    @router.post(
        "/v2/repository/index",
        summary="All models",
        response_model=RepositoryIndex,
        response_description="Every model, and whether it answers.",
        responses=oip_problems(
            e400="The body is not JSON that can be read, or a field of it is wrong.",
            e403="A page of another address sent the request.",
            e408="The body did not arrive in time.",
            e413="The body is too large.",
        ),
        openapi_extra={
            "requestBody": {
                "required": False,
                "content": {
                    "application/json": {"schema": {"$ref": "#/components/schemas/IndexRequest"}}
                },
            }
        },
    )
    async def index(request: Request) -> Response:
        body = await read_body(
            request, reader.settings.max_body_bytes, reader.settings.body_timeout_s
        )
        only_ready = False
        if body.strip():
            asked = await checked_json(request, body, IndexRequest, reader, explain)
            only_ready = asked.ready
        entries = [_entry(engine, served) for served in engine.catalog]
        listed = [one for one in entries if one.state == "READY" or not only_ready]
        return answer(RepositoryIndex(listed))

    return router


def find_version(engine: Engine, name: str, version: str) -> Served:
    """The model of that name; UnknownModel for any version but the one that is served."""
    served = engine.catalog.find(name)
    if version != VERSION:
        raise UnknownModel(
            f"{name} has no version {version[:80]!r}: it has {VERSION}", param="version"
        )
    return served


def _entry(engine: Engine, served: Served) -> RepositoryEntry:
    try:
        engine.check_open()
        _check_ready(engine, served)
    except ServeError as error:
        return RepositoryEntry(
            name=served.name, version=VERSION, state="UNAVAILABLE", reason=error.message
        )
    return RepositoryEntry(name=served.name, version=VERSION, state="READY", reason="")


def _check_ready(engine: Engine, served: Served) -> None:
    if served.name in engine.failing:
        raise NotReady(f"the last call of {served.name} failed: it is tried again every second")
