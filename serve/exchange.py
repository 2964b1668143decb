"""A request and its answer on their way through the server, and the routes that take them.

One `Exchange` holds everything that travels with a request: the connection makes it, the middleware
fills it in, routes note what they did. Every route is one of FastAPI's.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Depends
from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from serve.catalog import Served
from serve.engine.job import Job
from serve.errors import MethodNotAllowed, ServeError
from serve.keys import Holder

Header = tuple[bytes, bytes]
HeaderList = tuple[Header, ...]

EXCHANGE_KEY = "stepdial.exchange"  # the place of an Exchange in the ASGI scope


class ClientGone(Exception):
    """The client has disconnected: nobody is left to answer."""


class ReadyAnswer(Response):
    """A 200 with this JSON. Skips the checks that the framework makes for each header."""

    def __init__(self, body: bytes, *headers: Header) -> None:
        self.status_code = 200
        self.body = body
        self.background = None
        self.raw_headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
            *headers,
        ]


class OwnConnection(Protocol):
    """What a connection of our own server does faster than ASGI."""

    def take_body(self) -> bytes | None:
        """The body, which has arrived whole; None if the client has disconnected."""
        ...

    def write_whole(
        self, status: int, headers: Sequence[Header], always: HeaderList, body: bytes
    ) -> bool:
        """Write a whole answer at once; False if that is not possible now."""
        ...


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its answer: everything that travels with them.

    It refers neither to the scope nor, when the request is over, to `receive`: nothing keeps it
    until the garbage collector comes.
    """

    # From the connection.
    arrived_s: float = field(default_factory=time.perf_counter)
    connection: OwnConnection | None = None  # None behind another server
    over_limit: bool = False  # there are too many connections
    probing: bool = False  # it arrived at the port for probes
    has_body: bool = False  # the body has arrived whole
    ended: bool = False  # the connection has answered it during shutdown
    gone: bool = False  # the client has disconnected
    # From the middleware.
    id: str = ""
    method: str = ""
    path: str = ""
    query: bytes = b""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    header_list: Sequence[Header] = ()
    receive: Receive | None = None
    holder: Holder | None = None  # of the API key
    own_headers: HeaderList = ()  # of the answer, besides those of every answer
    always: HeaderList = ()  # those of every answer
    status: int = 0  # of the answer, once it has begun
    error: str | None = None  # the code of the error that ended it
    failed_as: int = 0  # the status of what ended an answer that had begun
    # From the route.
    weight: int = 0  # bytes of memory until it has been read
    served: list[Served] = field(default_factory=list)  # the models that it uses
    model: str = ""  # the model that serves it
    steps: int | None = None  # None until the work was accepted
    reason: str | None = None  # of the budget decision
    jobs: list[Job] = field(default_factory=list)  # that the engine took
    computed_s: float | None = None  # when the last model call ended
    _watchers: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> "Exchange":
        """The exchange of a request."""
        exchange: Exchange = request.scope[EXCHANGE_KEY]
        return exchange

    def fail(self, error: ServeError) -> None:
        """It ends with this error, whatever the route still does."""
        self.error, self.failed_as = error.code, error.status

    # The client.

    def leave(self) -> None:
        """The client has disconnected."""
        if not self.gone:
            self.gone = True
            for leave in [*self._watchers]:
                leave()

    def watch(self, leave: Callable[[], None]) -> Callable[[], object]:
        """Call `leave` when the client disconnects, or now if it has; the result ends the watch."""
        if self.connection is None:
            return asyncio.create_task(self._await_disconnect(leave)).cancel
        if self.gone:
            leave()
            return lambda: None
        self._watchers.append(leave)
        return lambda: self._watchers.remove(leave)

    async def _await_disconnect(self, leave: Callable[[], None]) -> None:
        receive = self.receive
        assert receive is not None
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    # The answer.

    def write(self, response: Response) -> bool:
        """Write a whole answer at once; False if it has to be sent by ASGI."""
        if self.connection is None or type(response) not in _WHOLE or self.method == "HEAD":
            return False
        headers = response.raw_headers
        if type(response) is Response and b"connection" in dict(headers):  # uvicorn closes it
            return False
        written = self.connection.write_whole(
            response.status_code, [*headers, *self.own_headers], self.always, bytes(response.body)
        )
        if written:
            self.status = response.status_code
        return written


# Responses that have their body, and no background task.
_WHOLE = (ReadyAnswer, Response)
# The parameter `exchange` of a route's function.
ThisExchange = Annotated[Exchange, Depends(Exchange.of)]


class Route(APIRoute):
    """A route whose function returns a response.

    The function takes `exchange`, `request` and the parameters of its path, each if it names it,
    and is called without the rest of FastAPI's injection.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        names = inspect.signature(endpoint).parameters
        self._takes_exchange, self._takes_request = "exchange" in names, "request" in names

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the function, and send what it returns."""
        if scope["method"] not in (self.methods or ()):
            raise MethodNotAllowed(scope["path"], scope["method"], _allowed(scope))
        exchange: Exchange = scope[EXCHANGE_KEY]
        given: dict[str, Any] = scope.get("path_params", {})
        if self._takes_exchange:
            response = await self.endpoint(exchange, **given)
        elif self._takes_request:
            response = await self.endpoint(Request(scope, receive), **given)
        else:
            response = await self.endpoint(**given)
        if not exchange.write(response):
            await response(scope, receive, send)


def _allowed(scope: Scope) -> list[str]:
    """The methods that a path takes, over all of its routes."""
    methods: set[str] = set()
    for context in iter_route_contexts(scope["app"].routes):
        if context.original_route.matches(scope)[0] is Match.PARTIAL:
            methods |= set(context.methods or ())
    if "GET" in methods:
        methods.add("HEAD")  # which the middleware makes a GET
    return sorted(methods)


def nearby(scope: Scope) -> str | None:
    """A path that there is, if this one has a slash too many, or /v1 too often or not at all."""
    sent: str = scope["path"]
    bare = sent.rstrip("/")
    found = [context.original_route for context in iter_route_contexts(scope["app"].routes)]
    routes = [route for route in found if isinstance(route, Route)]
    for path in (bare, f"/v1{bare}", bare.removeprefix("/v1")):
        moved = {**scope, "path": path}
        if path != sent and any(route.matches(moved)[0] is not Match.NONE for route in routes):
            return path
    return None


class Router:
    """Calls the route of a request.

    Most have a path without parameters, which one look-up finds; the others, and what no route
    takes, are left to FastAPI's router.
    """

    def __init__(self, router: APIRouter) -> None:
        self._router = router
        self._literal = {
            (method, context.original_route.path): context.original_route
            for context in iter_route_contexts(router.routes)
            if isinstance(context.original_route, Route)
            and not context.original_route.param_convertors
            for method in context.original_route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            route = self._literal.get((scope["method"], scope["path"]))
        if route is None:
            await self._router(scope, receive, send)
            return
        scope["route"] = route
        await route.handle(scope, receive, send)
