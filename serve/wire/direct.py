"""A short way to the routes that most requests take, past what a framework does for all others.

The routes stay registered as usual, so that they are documented and that every other method and
path finds its answer; this only saves their requests the search and the dependencies that none of
them has. Plain ASGI; it deliberately knows nothing of what the routes do.
"""

from collections.abc import Awaitable, Callable, Iterable

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import ServeError
from serve.wire.mailbox import ClientGone

Handle = Callable[[Request, Exception], Awaitable[Response]]


class DirectRoutes:
    """Wraps the application; `handle` turns the errors of endpoints into answers."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], handle: Handle) -> None:
        self._app = app
        self._handle = handle
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, APIRoute)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response: Response = await route.endpoint(request)
        except (ServeError, ClientGone) as error:
            response = await self._handle(request, error)
        await response(scope, receive, send)
