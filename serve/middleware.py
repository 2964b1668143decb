"""What happens around every request: origin check, API key, id, headers, errors, log and traces.

Plain ASGI, for speed.
"""

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import (
    BadRequest,
    CrossOrigin,
    Crowded,
    Draining,
    InternalError,
    MethodNotAllowed,
    NotFound,
    OutOfMemory,
    ServeError,
    Unauthorized,
    Unprocessable,
    error_body,
    is_panic,
    speaks_oip,
)
from serve.exchange import EXCHANGE_KEY, ClientGone, Exchange, HeaderList, nearby
from serve.keys import Holder, Keys, secret_of
from serve.metrics import Metrics
from serve.tracing import Traces

# Cross-origin requests. Any web page that a browser shows could send one, so only the origins of
# the settings may (CORS). Programs send no Origin header and are not affected.


_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_SHOWN = 100

# No credentials: the page sets the key as a header, the browser never adds it.
_PREFLIGHT: HeaderList = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, *"),  # `*` does not include that one
    (b"access-control-max-age", b"7200"),
)
_READABLE: HeaderList = (
    (
        b"access-control-expose-headers",
        b"retry-after, retry-after-ms, server-timing, x-request-id",
    ),
)
_VARY = (b"vary", b"origin")


def cross_origin_headers(scope: Scope, allowed: Collection[str]) -> HeaderList:
    """The headers that let a page of an allowed origin read the answer."""
    if not allowed:
        return ()
    origin = Headers(scope=scope).get("origin")
    if origin is None or origin not in allowed:
        return (_VARY,)
    return ((b"access-control-allow-origin", origin.encode()), _VARY, *_READABLE)


def preflight_headers(scope: Scope, allowed: Collection[str]) -> HeaderList | None:
    """The answer to a CORS preflight request; None if this is not one."""
    if scope["method"] != "OPTIONS" or not allowed:
        return None
    headers = Headers(scope=scope)
    if headers.get("origin") not in allowed or "access-control-request-method" not in headers:
        return None
    return _PREFLIGHT


def check_origin(scope: Scope, allowed: Collection[str] = ()) -> CrossOrigin | None:
    """The error for a request whose Origin is neither this host nor an allowed one."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None:  # as in requests of programs
        return None
    # Behind a proxy the Host header may have changed. A page can set neither of these two.
    if origin in allowed or headers.get("sec-fetch-site") == "same-origin":
        return None
    hosts = [headers.get("host", ""), *headers.get("x-forwarded-host", "").split(",")]
    scheme, own = _place(origin)
    if own and own in {_without_port(host, scheme) for host in hosts}:
        return None
    return CrossOrigin(
        f"a page of {origin[:_MAX_SHOWN]!r} sent this request, but the server takes requests of "
        "its own page only: use that page, or call from a program, which sends no Origin header",
        origin=origin[:_MAX_SHOWN],
    )


def _place(origin: str) -> tuple[str, str]:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return "", ""
    return parts.scheme, _without_port(parts.netloc, parts.scheme)


def _without_port(host: str, scheme: str) -> str:
    return host.strip().lower().removesuffix(_DEFAULT_PORTS.get(scheme, "") or "\0")


# API keys. Every path needs a key except the health probes, so that a route added later does too.


# The page learns from it that programs need a key, where the browser itself sends one.
_VARY_BY_KEY = (b"vary", b"authorization, x-api-key")
# These routes check keys of their own.
ADMIN_PREFIX = "/admin/"
# The page and its reference of the API, with the files below /static/. They need a key, but are
# not counted among its requests.
_PAGE = frozenset({"/", "/docs", "/docs.css", "/openapi.json"})
# How browsers mark requests of scripts.
_OF_SCRIPTS = ((b"sec-fetch-mode", b"cors"), (b"sec-fetch-mode", b"same-origin"))
PROBES = frozenset(
    {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
)
# The paths of the port for probes; they are not traced.
PROBE_PORT_PATHS = PROBES | {"/metrics"}


def authenticate(exchange: Exchange, keys: Keys) -> Holder | None:
    """The holder of the request's key, with the request counted; None for probes and the page.

    Unauthorized without a known key; RateLimited or ConcurrencyLimited if the key's limits are used
    up.
    """
    if exchange.path in PROBES or exchange.path.startswith(ADMIN_PREFIX):
        return None
    secret = secret_of(exchange.header_list)
    of_script = any(header in _OF_SCRIPTS for header in exchange.header_list)
    if secret is None:
        raise Unauthorized(
            "this server takes requests with an API key only: send it as `Authorization: Bearer "
            "KEY` or as `x-api-key: KEY`; a browser asks for it as a password, with any name",
            of_script=of_script,
        )
    holder = keys.holder_of(secret)
    if holder is None:
        unknown = "this server does not know the API key: check that it is complete"
        raise Unauthorized(unknown, of_script=of_script)
    if exchange.path in _PAGE or exchange.path.startswith("/static/"):
        return None  # the page is thirty files, more than a key may have at once
    holder.enter()
    return holder


# The middleware itself.


CLIENT_GONE = 499  # only counted: there is no client to read it

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
# Methods that run no model.
_LOOKING = ("GET", "HEAD", "OPTIONS")
_PRINTABLE = "/%:@!$&'()*+,;=-._~"
_log = logging.getLogger("stepdial")
_access = logging.getLogger("stepdial.access")
# Ids are not secret, and asking the system for random bytes can make the thread wait.
_ids = random.Random()


@dataclass(frozen=True, slots=True)
class RequestMiddleware:
    """Checks every request, sets its headers, and counts and logs it."""

    app: ASGIApp
    metrics: Metrics
    keys: Keys
    origins: Collection[str] = ()
    access_log: bool = False
    traces: Traces | None = None
    takes: Callable[[float], bool] = lambda _: True  # whether what arrived then is still accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange: Exchange | None = scope.get(EXCHANGE_KEY)
        if exchange is None:  # behind another server than ours
            exchange = scope[EXCHANGE_KEY] = Exchange()
        exchange.method, exchange.path = scope["method"], scope["path"]
        exchange.query = scope["query_string"]
        exchange.header_list = scope["headers"]
        headers = exchange.headers = dict(exchange.header_list)
        exchange.receive = receive
        exchange.id = request_id = request_id_of(headers)
        exchange.own_headers = ((b"x-request-id", request_id.encode()),)
        exchange.always = SECURITY_HEADERS
        if self.origins:
            exchange.own_headers += cross_origin_headers(scope, self.origins)
        if exchange.method == "HEAD":  # the same answer as for GET, without the body
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                own = exchange.own_headers
                message["headers"] = [*message.get("headers", ()), *own, *SECURITY_HEADERS]
            elif exchange.method == "HEAD" and message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        try:
            await self._answer(exchange, scope, receive, send_with_headers)
        except ClientGone:
            exchange.failed_as = exchange.failed_as or CLIENT_GONE
            if not exchange.status:
                gone = Response(status_code=exchange.failed_as)
                await gone(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            if not exchange.ended:
                raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            short = isinstance(error, MemoryError)
            _log.exception(
                "%s in request %s", "out of memory" if short else "internal error", request_id
            )
            bug = InternalError(f"this is our bug; please report it with the id {request_id}")
            shown = OutOfMemory() if short else bug
            if exchange.status:
                exchange.fail(shown)
                raise  # the response has started: only closing the connection tells the client
            await self._refuse(exchange, shown, scope, receive, send_with_headers)
        finally:
            if exchange.holder is not None:
                exchange.holder.leave()
            for served in exchange.served:
                served.users -= 1
            exchange.receive = None
            self._count(exchange, scope)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or say why not."""
        preflight = preflight_headers(scope, self.origins) if self.origins else None
        if preflight is not None:  # before the key check: browsers send no key with it
            await send({"type": "http.response.start", "status": 204, "headers": list(preflight)})
            await send({"type": "http.response.body", "body": b""})
            return
        try:
            self._admit(exchange, scope)
            await self.app(scope, receive, send)
        except ServeError as error:
            shown = error
        except HTTPException as error:
            shown = _as_serve_error(error, exchange, scope)
        else:
            return
        if exchange.status:
            raise shown  # too late: the response has started
        await self._refuse(exchange, shown, scope, receive, send)

    async def _refuse(
        self, exchange: Exchange, error: ServeError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        exchange.error = exchange.error or error.code
        response = error_response(error, exchange.path)
        if not exchange.write(response):
            await response(scope, receive, send)

    def _admit(self, exchange: Exchange, scope: Scope) -> None:
        """Let a request in, or raise a ServeError."""
        path = exchange.path
        if exchange.over_limit and path not in PROBES:
            raise Crowded("too many connections are open to this server: try again in a moment")
        if exchange.probing and path not in PROBE_PORT_PATHS:
            raise NotFound("this port has the probes and /metrics only")
        if exchange.method not in _LOOKING and not self.takes(exchange.arrived_s):
            raise Draining("the server is shutting down: send the request to another")
        if b"origin" in exchange.headers:  # not in requests of programs
            refusal = check_origin(scope, self.origins)
            if refusal is not None:
                raise refusal
        if self.keys.in_use:
            exchange.own_headers += (_VARY_BY_KEY,)
            exchange.holder = authenticate(exchange, self.keys)

    def _count(self, exchange: Exchange, scope: Scope) -> None:
        # Of an answer that had begun, the status that what ended it would have had.
        status = exchange.failed_as or exchange.status or CLIENT_GONE
        ended_s = time.perf_counter()
        route, model = getattr(scope.get("route"), "path", None), exchange.model
        labels = route or "none", model
        taken_s = ended_s - exchange.arrived_s
        self.metrics.requests.labels(*labels, str(status)).inc()
        if status < 400:
            rung = "" if exchange.steps is None else str(exchange.steps)
            self.metrics.request_seconds.labels(*labels, rung).observe(taken_s)
        else:  # errors have no step count
            self.metrics.refused_seconds.labels(*labels, str(status)).observe(taken_s)
        if exchange.error is not None:
            self.metrics.rejected.labels(exchange.error).inc()
        if self.access_log or self.traces is not None:
            self._write_down(exchange, scope, route, status, ended_s)

    def _write_down(
        self, exchange: Exchange, scope: Scope, route: str | None, status: int, ended_s: float
    ) -> None:
        """Log and trace a finished request."""
        method, path = exchange.method, _path_as_sent(scope)
        fields: dict[str, str | int] = {"id": exchange.id}
        if exchange.model:
            fields["model"] = exchange.model
            if exchange.steps is not None:
                fields["steps"] = exchange.steps
        if exchange.reason is not None:
            fields["reason"] = exchange.reason
        if exchange.error is not None:
            fields["error"] = exchange.error
        if self.traces is not None and exchange.path not in PROBE_PORT_PATHS:
            attributes = {
                "http.request.method": method,
                "http.response.status_code": exchange.status or status,
                "url.path": path,
                "url.scheme": scope["scheme"],
                **({"http.route": route} if route else {}),
                **{f"stepdial.{key}": value for key, value in fields.items()},
            }
            name = f"{method} {route}" if route else method
            fields["trace_id"] = self.traces.record(exchange, name, status, attributes, ended_s)
        if self.access_log:
            milliseconds = (ended_s - exchange.arrived_s) * 1000
            of_http = {"method": method, "path": path, "status": status}
            noted = [f" {key}={value}" for key, value in fields.items() if key != "id"]
            _access.info(
                "%s %s %d %.1f ms %s%s",
                *(method, path, status, milliseconds, fields["id"], "".join(noted)),
                extra={"fields": of_http | {"ms": round(milliseconds, 3)} | fields},
            )


def note_refusal(error: ServeError, path: str, request_id: str) -> None:
    """Log a request that was refused before it was read."""
    path = quote(path, safe=_PRINTABLE) or "-"
    fields = {"path": path, "status": error.status, "id": request_id, "error": error.code}
    line = "- %s %d - %s error=%s"
    _access.info(line, *fields.values(), extra={"fields": {"method": "-"} | fields})


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The request's own id if it is safe to repeat, else a new one."""
    sent = headers.get(b"x-request-id")
    if sent is not None and _SENT_ID.fullmatch(sent):
        return str(sent, "ascii")
    return f"{_ids.getrandbits(64):016x}"


def _path_as_sent(scope: Scope) -> str:
    """The path in printable characters: a decoded one could forge log lines."""
    return quote(scope.get("raw_path") or scope["path"], safe=_PRINTABLE)


def error_response(error: ServeError, path: str) -> Response:
    """The answer to a request to this path that ends with an error."""
    # The Open Inference Protocol has 400 for every error of a client.
    status = 400 if speaks_oip(path) and isinstance(error, Unprocessable) else error.status
    return Response(
        json.dumps(error_body(error, path)),
        status_code=status,
        headers=error.headers(),
        media_type="application/json",
    )


def _as_serve_error(error: HTTPException, exchange: Exchange, scope: Scope) -> ServeError:
    """An error of the framework, in our words. Only files refuse a method there."""
    match error.status_code:
        case 404:
            meant = nearby(scope)
            hint = "see /docs" if meant is None else f"did you mean {meant}?"
            return NotFound(f"there is nothing at {exchange.path}: {hint}")
        case 405:
            return MethodNotAllowed(exchange.path, exchange.method, ("GET", "HEAD"))
        case _:
            return BadRequest(str(error.detail))
