"""The application: routes, errors and middleware around an engine.

`create_app` makes one; there is none at module level.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp

import stepdial
from serve.api.body import ClassifyRequest, GenerateRequest, Reader
from serve.api.models import LoadRequest, admin_routes, health_routes, model_routes
from serve.api.native import DoneChunk, TokenChunk, native_routes
from serve.api.oip import IndexRequest, InferRequest, oip_routes
from serve.api.openai import (
    ChatChunk,
    ChatRequest,
    CompletionChunk,
    CompletionRequest,
    EmbeddingRequest,
    openai_routes,
)
from serve.api.page import add_page
from serve.engine.engine import Engine
from serve.errors import speaks_oip, speaks_openai
from serve.exchange import Router
from serve.keys import Keys
from serve.loading import Loading
from serve.middleware import ADMIN_PREFIX, PROBES, RequestMiddleware
from serve.settings import ADMIN_KEY_VARIABLE, Settings
from serve.tracing import open_traces


class Application(FastAPI):
    """A FastAPI application with one middleware, which also turns errors into answers."""

    def __init__(self, middleware: Callable[[ASGIApp], ASGIApp], **chosen: Any) -> None:
        super().__init__(**chosen)
        self._middleware = middleware

    def build_middleware_stack(self) -> ASGIApp:
        return self._middleware(Router(self.router))


# Errors that any route can give, added to the OpenAPI document.


_REASONS = {
    "401": "The API key is missing or unknown.",
    "403": "A web page of another origin sent the request, or the API key forbids it.",
    "429": "The API key has sent too many requests, or too many of them run. `Retry-After` says "
    "when to try again.",
    "431": "The headers are too large or too many.",
    "503": "Too many connections are open.",
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "For browsers: any user name, with the key as password.",
    },
}


def document_refusals(document: dict[str, Any], needs_key: bool) -> None:
    """Add the errors that any request can get to every operation that does not document them."""
    if needs_key:
        document["components"]["securitySchemes"] = _SCHEMES
    for path, methods in document["paths"].items():
        if path in PROBES:
            continue
        for operation in methods.values():
            responses = operation["responses"]
            shape = next(
                (known["content"] for code, known in responses.items() if code >= "400"),
                _shape(_error_shape(path)),
            )
            for code, about in _REASONS.items():
                responses.setdefault(code, {"description": about, "content": shape})
            if needs_key and not path.startswith(ADMIN_PREFIX):
                operation["security"] = [{name: []} for name in _SCHEMES]


def _error_shape(path: str) -> str:
    if speaks_oip(path):
        return "OipError"
    return "OpenAIError" if speaks_openai(path) else "ErrorResponse"


def _shape(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


_ABOUT = (
    "Serves transformers that can run at several step counts. `steps` or `effort` of each "
    "request say how much work its answer should get, and every answer says what it got."
)
# Schemas that routes read or stream themselves, so that the framework does not find them.
_OWN_SHAPES = (
    ClassifyRequest,
    GenerateRequest,
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    InferRequest,
    IndexRequest,
    LoadRequest,
    TokenChunk,
    DoneChunk,
    CompletionChunk,
    ChatChunk,
)


def create_app(settings: Settings, engine: Engine, loading: Loading | None = None) -> FastAPI:
    """An application that serves this engine, and starts and stops it."""
    keys = Keys(settings.api_keys_file)
    admin_keys = Keys(settings.admin_keys_file, variable=ADMIN_KEY_VARIABLE)
    traces = open_traces(os.environ)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        engine.start(loop.call_soon_threadsafe, loop.call_soon)
        yield
        await asyncio.to_thread(engine.stop)
        reader.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    reader = Reader(settings, engine)
    middleware = partial(
        RequestMiddleware,
        metrics=engine.metrics,
        keys=keys,
        origins=settings.cors_origins,
        access_log=settings.access_log,
        traces=traces,
        takes=engine.takes,
    )
    app = Application(
        middleware,
        title="Stepdial",
        version=stepdial.__version__,
        description=_ABOUT,
        lifespan=lifespan,
        openapi_url=None,  # made on another thread instead: see serve.api.page
        docs_url=None,  # FastAPI's page loads scripts from another host: see serve.api.page
        redoc_url=None,
        redirect_slashes=False,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
        },  # the middleware makes ours
    )
    app.state.keys, app.state.admin_keys = keys, admin_keys
    app.include_router(native_routes(engine, reader))
    app.include_router(openai_routes(engine, reader))
    app.include_router(model_routes(engine))
    app.include_router(health_routes(engine))
    loading = loading or Loading(engine, settings)
    app.include_router(admin_routes(engine, loading, admin_keys, reader))
    app.include_router(oip_routes(engine, reader))
    add_page(app)
    app.openapi = lambda: _document(app, keys.in_use)  # type: ignore[method-assign]  # the documented way
    return app


def _document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document, with the schemas that routes handle themselves."""
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
        document_refusals(document, needs_key)
        app.openapi_schema = document
    return app.openapi_schema


def _drop_foreign_errors(document: dict[str, Any]) -> None:
    """Remove the framework's own 422, which no route here sends."""
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for methods in document["paths"].values():
        for operation in methods.values():
            if "HTTPValidationError" in json.dumps(operation["responses"].get("422", {})):
                del operation["responses"]["422"]
