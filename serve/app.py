"""The application: routes, errors and middleware around an engine.

`create_app` makes one; there is none at module level.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.api.body import Reader
from serve.api.embeddings import EmbeddingRequest, embedding_routes
from serve.api.fields import ClassifyRequest, DoneChunk, GenerateRequest, TokenChunk
from serve.api.models import LoadRequest, admin_routes, health_routes, model_routes
from serve.api.native import classify_routes, generate_routes
from serve.api.oip import IndexRequest, InferRequest, inference_routes, oip_model_routes
from serve.api.openai import (
    ChatChunk,
    ChatRequest,
    CompletionChunk,
    CompletionRequest,
    chat_routes,
    completion_routes,
)
from serve.api.page import add_page
from serve.api.submission import ClientGone, ReadyAnswer
from serve.engine.engine import Engine
from serve.errors import BadRequest, InvalidField, MethodNotAllowed, NotFound, ServeError
from serve.keys import Keys
from serve.loading import Loading
from serve.middleware import (
    ADMIN_PREFIX,
    CLIENT_GONE,
    PROBES,
    WRITE_KEY,
    AccessLog,
    RequestMiddleware,
    error_body,
    error_status,
    speaks_oip,
)
from serve.settings import ADMIN_KEY_VARIABLE, Settings
from serve.tracing import open_traces

# The routes that most requests take are called directly, without the framework's search for a route
# and its dependency injection. They stay registered as usual, so that they are documented and other
# methods and paths get the usual answers.


# Responses that have their body and no background task.
_WHOLE = (ReadyAnswer, JSONResponse, Response)
Handle = Callable[[Request, Exception], Awaitable[Response]]


class DirectApplication(FastAPI):
    """A FastAPI application that calls some routes directly."""

    def __init__(self, **chosen: Any) -> None:
        super().__init__(**chosen)
        self._direct: dict[tuple[str, str], APIRoute] = {}
        self._layer: ASGIApp = self._run

    def add_direct_routes(
        self, routes: Iterable[BaseRoute], handle: Handle, layer: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        """Call these routes directly, through one middleware; `handle` turns their errors into
        answers.
        """
        self._direct = {
            (method, route.path): route
            for route in routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }
        self._handle = handle
        self._layer = layer(self._run)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            route = self._direct.get((scope["method"], scope["path"]))
        if route is None:
            await super().__call__(scope, receive, send)
            return
        scope["route"] = route
        await self._layer(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response: Response = await scope["route"].endpoint(request)
        except (ServeError, ClientGone) as error:
            response = await self._handle(request, error)
        if type(response) not in _WHOLE or not scope[WRITE_KEY](response):
            await response(scope, receive, send)


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
                _shape("OipError" if speaks_oip(path) else "ErrorResponse"),
            )
            for code, about in _REASONS.items():
                responses.setdefault(code, {"description": about, "content": shape})
            if needs_key and not path.startswith(ADMIN_PREFIX):
                operation["security"] = [{name: []} for name in _SCHEMES]


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
    posts = [
        make(settings, engine, reader)
        for make in (
            classify_routes,
            generate_routes,
            completion_routes,
            chat_routes,
            embedding_routes,
        )
    ]
    handle = _error_handler(engine)
    middleware = partial(
        RequestMiddleware,
        metrics=engine.metrics,
        keys=keys,
        origins=settings.cors_origins,
        access=AccessLog(settings.access_log, traces),
        takes=engine.takes,
    )
    app = DirectApplication(
        title="Stepdial",
        description=_ABOUT,
        lifespan=lifespan,
        openapi_url=None,  # made on another thread instead: see serve.api.page
        docs_url=None,  # FastAPI's page loads scripts from another host: see serve.api.page
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # serve.tracing has its own
        middleware=[Middleware(middleware)],
    )
    app.add_direct_routes(
        (route for router in posts for route in router.routes), handle, middleware
    )
    app.state.keys, app.state.admin_keys = keys, admin_keys
    for router in posts:
        app.include_router(router)
    app.include_router(model_routes(engine))
    app.include_router(health_routes(engine))
    loading = loading or Loading(engine, settings)
    app.include_router(admin_routes(engine, loading, admin_keys, reader))
    app.include_router(oip_model_routes(engine, reader))
    app.include_router(inference_routes(settings, engine, reader))
    add_page(app)
    for kind in (ServeError, HTTPException, RequestValidationError, ClientGone):
        app.add_exception_handler(kind, handle)
    app.openapi = lambda: _document(app, bool(keys))  # type: ignore[method-assign]  # the documented way
    return app


def _error_handler(engine: Engine) -> Handle:
    """Turns every error into a response in the documented format."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_GONE)
        shown = _as_serve_error(error, request)
        if shown.status in (429, 503):
            engine.metrics.rejected.labels(shown.code).inc()
        path = request.scope["path"]
        return Response(
            json.dumps(error_body(shown, path)),
            status_code=error_status(shown, path),
            headers=_headers(error, request) | shown.headers(),
            media_type="application/json",
        )

    return handle


def _as_serve_error(error: Exception, request: Request) -> ServeError:
    if isinstance(error, ServeError):
        return error
    if isinstance(error, HTTPException):
        path, method = request.url.path, request.method
        if error.status_code == 404:
            return NotFound(f"there is nothing at {path}: see /docs")
        if error.status_code == 405:
            return MethodNotAllowed(f"{path} does not take {method}: send {_allowed(request)}")
        return BadRequest(str(error.detail))
    return InvalidField("the request does not have the shape that /docs describes")


def _headers(error: Exception, request: Request) -> dict[str, str]:
    if not isinstance(error, HTTPException):
        return {}
    return {"allow": _allowed(request)} if error.status_code == 405 else dict(error.headers or {})


def _allowed(request: Request) -> str:
    """The methods that a path takes; the framework names only those of the first route."""
    methods: set[str] = set()
    for context in iter_route_contexts(request.app.routes):
        if context.original_route.matches(request.scope)[0] is Match.PARTIAL:
            methods |= set(context.methods or ())
    return ", ".join(sorted(methods))


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
