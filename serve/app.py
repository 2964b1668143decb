"""The application: routes, errors and layers put together around an engine.

There is none at module level: whoever needs one calls `create_app`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.engine import Engine
from serve.errors import BadRequest, InvalidField, MethodNotAllowed, NotFound, ServeError
from serve.routes.classify import classify_routes
from serve.routes.generate import generate_routes
from serve.routes.health import health_routes
from serve.routes.models import model_routes
from serve.routes.page import add_page
from serve.settings import Settings
from serve.wire.answers import DoneChunk, TokenChunk
from serve.wire.direct import DirectRoutes, Handle
from serve.wire.envelope import CLIENT_GONE, Envelope
from serve.wire.error_shapes import error_body
from serve.wire.mailbox import ClientGone
from serve.wire.schemas import ClassifyRequest, GenerateRequest

_ABOUT = (
    "Answers of transformers whose depth is a dial: `steps` or `effort` of each request set how "
    "much work it gets, and every answer says what it got."
)
# Shapes that routes read or stream themselves, so that the framework does not find them.
_OWN_SHAPES = (ClassifyRequest, GenerateRequest, TokenChunk, DoneChunk)


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """An application that serves this engine, and starts and stops it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop().call_soon_threadsafe)
        yield
        await asyncio.to_thread(engine.stop)

    classify, generate = classify_routes(settings, engine), generate_routes(settings, engine)
    handle = _error_handler(engine)
    app = FastAPI(
        title="Stepdial",
        description=_ABOUT,
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from another host: see serve.wire.reference
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(Envelope, metrics=engine.metrics, access_log=settings.access_log),
            Middleware(DirectRoutes, routes=[*classify.routes, *generate.routes], handle=handle),
        ],
    )
    app.include_router(classify)
    app.include_router(generate)
    app.include_router(model_routes(engine))
    app.include_router(health_routes(engine))
    add_page(app)
    for kind in (ServeError, HTTPException, RequestValidationError, ClientGone):
        app.add_exception_handler(kind, handle)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]  # the documented way
    return app


def _error_handler(engine: Engine) -> Handle:
    """Every error leaves in the one shape that is documented."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_GONE)
        shown = _own(error, request)
        if shown.status in (429, 503):
            engine.metrics.rejected.labels(shown.code).inc()
        return Response(
            json.dumps(error_body(shown, request.url.path)),
            status_code=shown.status,
            headers=_headers(error) | shown.headers(),
            media_type="application/json",
        )

    return handle


def _own(error: Exception, request: Request) -> ServeError:
    if isinstance(error, ServeError):
        return error
    if isinstance(error, HTTPException):
        path, method = request.url.path, request.method
        if error.status_code == 404:
            return NotFound(f"there is nothing at {path}: see /docs")
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            return MethodNotAllowed(f"{path} does not take {method}: send {allowed}")
        return BadRequest(str(error.detail))
    return InvalidField("the request does not have the shape that /docs describes")


def _headers(error: Exception) -> dict[str, str]:
    return dict(error.headers or {}) if isinstance(error, HTTPException) else {}


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the shapes that routes handle themselves."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=_ABOUT, routes=app.routes
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for shape in _OWN_SHAPES:
            schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[shape.__name__] = schema
        _drop_foreign_errors(document)
        app.openapi_schema = document
    return app.openapi_schema


def _drop_foreign_errors(document: dict[str, Any]) -> None:
    """The framework documents a 422 of its own shape, which no route here ever sends."""
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for methods in document["paths"].values():
        for operation in methods.values():
            if "HTTPValidationError" in json.dumps(operation["responses"].get("422", {})):
                del operation["responses"]["422"]
