"""The outermost layer of every request: who is let in, its id, its headers, its place in the
metrics.

Plain ASGI, so that it costs little; it deliberately knows nothing of what the routes do. They
leave in the scope which model and steps served the request.
"""

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Callable, Collection
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.catalog import Guests
from serve.errors import (
    Crowded,
    Draining,
    InternalError,
    NotFound,
    OutOfMemory,
    ServeError,
)
from serve.keys import Holder, Keys
from serve.metrics import Metrics
from serve.wire.access import ID_KEY, SERVED_KEY, Access
from serve.wire.error_shapes import error_body
from serve.wire.gate import PROBES, WATCHED, enter
from serve.wire.origin import HeaderList, cross_origin, cross_origin_headers, preflight_headers

ARRIVED_KEY = "stepdial.arrived_s"
GUESTS_KEY = "stepdial.guests"  # of the models that the request is with
CROWDED_KEY = "stepdial.crowded"  # the connection is one more than there may be
PROBING_KEY = "stepdial.probing"  # it came at the port of probes
ENDED_KEY = "stepdial.ended"  # the connection has answered it, since the server ends
WHOLE_KEY = "stepdial.whole"  # how our own connections write a whole answer in one piece
# How a route writes one; False if it has to go the usual way.
WRITE_KEY = "stepdial.write"
CLIENT_GONE = 499  # nobody reads this status; it is only counted

_SENT_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
SECURITY_HEADERS: HeaderList = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"permissions-policy",
        b"camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    ),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
)
# What asks no model for work.
_LOOKING = ("GET", "HEAD", "OPTIONS")
_UNWRITTEN = Access(log=False, traces=None)
_log = logging.getLogger("stepdial")
# Ids are no secrets: asking the system for each would let another thread run, and wait for it.
_ids = random.Random()


class Envelope:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: Keys,
        origins: Collection[str] = (),
        access: Access = _UNWRITTEN,
        takes: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """`takes` tells whether work that came at this time is still taken in."""
        self._app = app
        self._takes = takes
        self._metrics = metrics
        self._keys = keys
        self._origins = frozenset(origins)
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Whoever took the request in before this process may have said when.
        arrived_s = scope.setdefault(ARRIVED_KEY, time.perf_counter())
        request_id = scope[ID_KEY] = request_id_of(scope)
        own: HeaderList = ((b"x-request-id", request_id.encode()),)
        if self._origins:
            own += cross_origin_headers(scope, self._origins)
        staying: list[Guests] = []
        scope[GUESTS_KEY] = staying
        method, status = scope["method"], 0
        if method == "HEAD":  # the same answer as to GET, without its body
            scope = {**scope, "method": "GET"}

        write_whole = scope.get(WHOLE_KEY)

        def write(response: Response) -> bool:
            nonlocal status
            headers = response.raw_headers
            if write_whole is None or b"connection" in dict(headers):
                return False
            written: bool = write_whole(
                response.status_code, [*headers, *own], SECURITY_HEADERS, response.body
            )
            if written:
                status = response.status_code
            return written

        scope[WRITE_KEY] = write

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own, *SECURITY_HEADERS]
            elif method == "HEAD" and message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        holder: Holder | None = None
        try:
            preflight = preflight_headers(scope, self._origins) if self._origins else None
            if preflight is not None:  # before any key: browsers send none with it
                await _send_empty(send_with_headers, preflight)
                return
            try:
                holder = self._let_in(scope)
            except ServeError as refusal:
                self._metrics.rejected.labels(refusal.code).inc()
                await _send_error(send_with_headers, refusal, scope["path"])
                return
            await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            if ENDED_KEY not in scope:
                raise
        except Exception as error:
            short = isinstance(error, MemoryError)
            _log.exception(
                "%s in request %s", "no memory" if short else "a bug of ours", request_id
            )
            if status:
                raise  # the response has begun: only breaking the connection tells the client
            bug = InternalError(f"this is our bug; please report it with the id {request_id}")
            await _send_error(send_with_headers, OutOfMemory() if short else bug, scope["path"])
        finally:
            if holder is not None:
                holder.leave()
            for guests in staying:
                guests.count -= 1
            self._count(scope, method, status or CLIENT_GONE, arrived_s)

    def _let_in(self, scope: Scope) -> Holder | None:
        """Whoever holds the key of this request, if keys are needed; a ServeError refuses it."""
        if CROWDED_KEY in scope and scope["path"] not in PROBES:
            raise Crowded("too many connections are open to this server: try again in a moment")
        if PROBING_KEY in scope and scope["path"] not in WATCHED:
            raise NotFound("this port has the probes and /metrics only")
        if scope["method"] not in _LOOKING and not self._takes(scope[ARRIVED_KEY]):
            raise Draining("the server is shutting down: send the request to another")
        refusal = cross_origin(scope, self._origins)
        if refusal is not None:
            raise refusal
        return enter(scope, self._keys) if self._keys else None

    def _count(self, scope: Scope, method: str, status: int, arrived_s: float) -> None:
        ended_s = time.perf_counter()
        route = getattr(scope.get("route"), "path", "none")
        model, steps = scope.get(SERVED_KEY, ("", None))
        self._metrics.requests.labels(route, model, str(status)).inc()
        if status < 400:
            rung = "" if steps is None else str(steps)
            self._metrics.request_seconds.labels(route, model, rung).observe(ended_s - arrived_s)
        else:  # it had no rung, or no answer of it
            refused = self._metrics.refused_seconds.labels(route, model, str(status))
            refused.observe(ended_s - arrived_s)
        self._access.write(scope, method, status, arrived_s, ended_s)


def stay(scope: Scope, guests: Guests) -> None:
    """The request is with this model until it ends, though another may replace it meanwhile."""
    guests.count += 1
    scope[GUESTS_KEY].append(guests)


def request_id_of(scope: Scope) -> str:
    """The caller's own id where it sent one that can be repeated safely, else a new one."""
    sent: bytes | None = dict(scope["headers"]).get(b"x-request-id")
    if sent is not None and _SENT_ID.fullmatch(sent):
        return str(sent, "ascii")
    return f"{_ids.getrandbits(64):016x}"


async def _send_error(send: Any, error: ServeError, path: str) -> None:
    body = json.dumps(error_body(error, path)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in error.headers().items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_empty(send: Any, headers: HeaderList) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": list(headers)})
    await send({"type": "http.response.body", "body": b""})
