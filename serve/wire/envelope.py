"""The outermost layer of every request: its id, its headers, its place in the metrics.

Plain ASGI, so that it costs little; it deliberately knows nothing of what the routes do. They
leave in the scope which model and steps served the request.
"""

import json
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import InternalError, ServeError
from serve.metrics import Metrics
from serve.wire.error_shapes import error_body
from serve.wire.origin import cross_origin

ID_KEY = "stepdial.id"
ARRIVED_KEY = "stepdial.arrived_s"
SERVED_KEY = "stepdial.served"  # (model, steps)
CLIENT_GONE = 499  # nobody reads this status; it is only counted

_PRINTABLE = "/%:@!$&'()*+,;=-._~"
_SENT_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_SECURITY: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        b"form-action 'self'; frame-ancestors 'none'",
    ),
)
_log = logging.getLogger("stepdial")
_access = logging.getLogger("stepdial.access")


class Envelope:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, metrics: Metrics, access_log: bool = False) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_s = scope[ARRIVED_KEY] = time.perf_counter()
        request_id = scope[ID_KEY] = _request_id(scope)
        method, status = scope["method"], 0
        if method == "HEAD":  # the same answer as to GET, without its body
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = ((b"x-request-id", request_id.encode()), *_SECURITY)
                message["headers"] = [*message.get("headers", ()), *extra]
            elif method == "HEAD" and message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        try:
            refusal = cross_origin(scope)
            if refusal is not None:
                await _send_error(send_with_headers, refusal, scope["path"])
                return
            await self._app(scope, receive, send_with_headers)
        except Exception:
            _log.exception("a bug of ours in request %s", request_id)
            if status:
                raise  # the response has begun: only breaking the connection tells the client
            bug = InternalError(f"this is our bug; please report it with the id {request_id}")
            await _send_error(send_with_headers, bug, scope["path"])
        finally:
            self._count(scope, method, status or CLIENT_GONE, arrived_s)

    def _count(self, scope: Scope, method: str, status: int, arrived_s: float) -> None:
        seconds = time.perf_counter() - arrived_s
        route = getattr(scope.get("route"), "path", "none")
        model, steps = scope.get(SERVED_KEY, ("", ""))
        self._metrics.requests.labels(route, model, str(status)).inc()
        self._metrics.request_seconds.labels(route, model, str(steps)).observe(seconds)
        if self._access_log:
            _access.info(
                "%s %s %d %.1f ms %s",
                method,
                _path_as_sent(scope),
                status,
                seconds * 1000,
                scope[ID_KEY],
            )


def _request_id(scope: Scope) -> str:
    """The caller's own id where it sent one that can be repeated safely, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SENT_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


def _path_as_sent(scope: Scope) -> str:
    """The path in printable characters only: a decoded one could forge lines of the log."""
    return quote(scope.get("raw_path") or scope["path"], safe=_PRINTABLE)


async def _send_error(send: Any, error: ServeError, path: str) -> None:
    body = json.dumps(error_body(error, path)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
