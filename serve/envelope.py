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

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import InternalError
from serve.metrics import Metrics

ID_KEY = "stepdial.id"
ARRIVED_KEY = "stepdial.arrived_s"
SERVED_KEY = "stepdial.served"  # (model, steps)
CLIENT_GONE = 499  # nobody reads this status; it is only counted

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
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = ((b"x-request-id", request_id.encode()), *_SECURITY)
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            _log.exception("a bug of ours in request %s", request_id)
            if status:
                raise  # the response has begun: only breaking the connection tells the client
            await _send_error(send_with_headers, request_id)
        finally:
            self._count(scope, status or CLIENT_GONE, arrived_s, request_id)

    def _count(self, scope: Scope, status: int, arrived_s: float, request_id: str) -> None:
        seconds = time.perf_counter() - arrived_s
        route = getattr(scope.get("route"), "path", "none")
        model, steps = scope.get(SERVED_KEY, ("", ""))
        self._metrics.requests.labels(route, model, str(status)).inc()
        self._metrics.request_seconds.labels(route, model, str(steps)).observe(seconds)
        if self._access_log:
            _access.info(
                "%s %s %d %.1f ms %s",
                scope["method"],
                scope["path"],
                status,
                seconds * 1000,
                request_id,
            )


def _request_id(scope: Scope) -> str:
    """The caller's own id where it sent one that can be repeated safely, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SENT_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


async def _send_error(send: Any, request_id: str) -> None:
    error = InternalError(f"this is our bug; please report it with the id {request_id}")
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
