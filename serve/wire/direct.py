"""A short way to the routes that most requests take, past what a framework does for all others.

The routes stay registered as usual, so that they are documented and that every other method and
path finds its answer; this only saves their requests the search and the dependencies that none of
them has. It deliberately knows nothing of what the routes do.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import ServeError
from serve.wire.envelope import WRITE_KEY
from serve.wire.mailbox import ClientGone
from serve.wire.ready import ReadyAnswer

# Whose body is there, and which do nothing afterwards.
_WHOLE = (ReadyAnswer, JSONResponse, Response)
Handle = Callable[[Request, Exception], Awaitable[Response]]


class DirectApplication(FastAPI):
    """A FastAPI application whose routes have a short way, if they are told to `lead`."""

    def __init__(self, **chosen: Any) -> None:
        super().__init__(**chosen)
        self._direct: dict[tuple[str, str], APIRoute] = {}
        self._layer: ASGIApp = self._run

    def lead(
        self, routes: Iterable[BaseRoute], handle: Handle, layer: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        """To these routes, through one layer; `handle` turns the errors of endpoints to answers."""
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
