"""What happens around every request: origin check, API key, request id, headers, access log.

Plain ASGI, for speed. Routes leave in the scope which model and step count served the request.
"""

import asyncio
import base64
import binascii
import json
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.catalog import ModelUsers
from serve.errors import (
    CrossOrigin,
    Crowded,
    Draining,
    InternalError,
    NotFound,
    OutOfMemory,
    ServeError,
    Unauthorized,
    Unprocessable,
)
from serve.keys import Holder, Keys
from serve.metrics import Metrics
from serve.tracing import FinishedRequest, Traces

# Cross-origin requests. Any web page that a browser shows could send one, so only the origins of
# the settings may (CORS). Programs send no Origin header and are not affected.


_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_SHOWN = 100

Header = tuple[bytes, bytes]
HeaderList = tuple[Header, ...]
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
    if b"origin" not in dict(scope["headers"]):  # as in requests of programs
        return None
    headers = Headers(scope=scope)
    origin = headers["origin"]
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


HOLDER_KEY = "stepdial.holder"
# These routes check keys of their own.
ADMIN_PREFIX = "/admin/"
# How browsers mark requests of scripts.
_OF_SCRIPTS = ((b"sec-fetch-mode", b"cors"), (b"sec-fetch-mode", b"same-origin"))
PROBES = frozenset(
    {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
)
# The paths of the port for probes; they are not traced.
PROBE_PORT_PATHS = PROBES | {"/metrics"}


def authenticate(scope: Scope, keys: Keys) -> Holder | None:
    """The holder of the request's key, with the request counted; None for probes.

    Unauthorized without a known key; RateLimited or ConcurrencyLimited if the key's limits are used
    up.
    """
    if scope["path"] in PROBES or scope["path"].startswith(ADMIN_PREFIX):
        return None
    secret = secret_of(scope["headers"])
    of_script = any(header in _OF_SCRIPTS for header in scope["headers"])
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
    holder.enter()
    scope[HOLDER_KEY] = holder
    return holder


def steps_allowed(scope: Scope) -> int | None:
    """The most steps that the request's key allows, if it has such a limit."""
    holder: Holder | None = scope.get(HOLDER_KEY)
    return None if holder is None else holder.key.max_steps


def spend_tokens(scope: Scope, tokens: int) -> None:
    """Reserve the tokens of a request from its key; TokensLimited if that is too many."""
    holder: Holder | None = scope.get(HOLDER_KEY)
    if holder is not None:
        holder.spend_tokens(tokens)


def return_tokens(scope: Scope, tokens: int) -> None:
    """Return reserved tokens that were not used."""
    holder: Holder | None = scope.get(HOLDER_KEY)
    if holder is not None:
        holder.return_tokens(tokens)


def secret_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request carries, if any."""
    found = None
    for name, value in headers:
        if name == b"x-api-key":
            return value
        if name == b"authorization":
            found = _authorized(value)
    return found


def _authorized(value: bytes) -> bytes | None:
    scheme, _, rest = value.partition(b" ")
    match scheme.lower():
        case b"bearer":
            return rest.strip()
        case b"basic":
            try:
                pair = base64.b64decode(rest.strip(), validate=True)
            except binascii.Error:
                return None
            return pair.partition(b":")[2]
        case _:
            return None


# The access log and traces, written when a request is over.


ID_KEY = "stepdial.id"
SERVED_KEY = "stepdial.served"  # (model, steps); None until the work was accepted
REASON_KEY = "stepdial.reason"  # of the budget decision
JOBS_KEY = "stepdial.jobs"
COMPUTED_KEY = "stepdial.computed_s"  # when the last model call ended

_PRINTABLE = "/%:@!$&'()*+,;=-._~"
_access = logging.getLogger("stepdial.access")


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Where finished requests are logged and traced."""

    log: bool
    traces: Traces | None

    def write(
        self, scope: Scope, method: str, status: int, arrived_s: float, ended_s: float
    ) -> None:
        """Log and trace a finished request."""
        if not self.log and self.traces is None:
            return
        fields: dict[str, str | int] = {"id": scope[ID_KEY]}
        if SERVED_KEY in scope:
            fields["model"], steps = scope[SERVED_KEY]
            if steps is not None:
                fields["steps"] = steps
        if REASON_KEY in scope:
            fields["reason"] = scope[REASON_KEY]
        if self.traces is not None and scope["path"] not in PROBE_PORT_PATHS:
            request = _finished(scope, method, status, arrived_s, ended_s, fields)
            fields["trace_id"] = self.traces.record(request)
        if self.log:
            path, milliseconds = _path_as_sent(scope), (ended_s - arrived_s) * 1000
            of_http = {"method": method, "path": path, "status": status}
            noted = [f" {key}={value}" for key, value in fields.items() if key != "id"]
            _access.info(
                "%s %s %d %.1f ms %s%s",
                *(method, path, status, milliseconds, fields["id"], "".join(noted)),
                extra={"fields": of_http | {"ms": round(milliseconds, 3)} | fields},
            )


def _finished(
    scope: Scope,
    method: str,
    status: int,
    arrived_s: float,
    ended_s: float,
    fields: dict[str, str | int],
) -> FinishedRequest:
    route = getattr(scope.get("route"), "path", None)
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "http.response.status_code": status,
        "url.path": _path_as_sent(scope),
        "url.scheme": scope["scheme"],
        **({"http.route": route} if route else {}),
        **{f"stepdial.{key}": value for key, value in fields.items()},
    }
    return FinishedRequest(
        name=f"{method} {route}" if route else method,
        headers={str(name, "latin-1"): str(value, "latin-1") for name, value in scope["headers"]},
        arrived_s=arrived_s,
        ended_s=ended_s,
        status=status,
        attributes=attributes,
        jobs=scope.get(JOBS_KEY, ()),
        computed_s=scope.get(COMPUTED_KEY),
    )


def _path_as_sent(scope: Scope) -> str:
    """The path in printable characters: a decoded one could forge log lines."""
    return quote(scope.get("raw_path") or scope["path"], safe=_PRINTABLE)


# Errors in the format of the protocol that the request used.


def error_status(error: ServeError, path: str) -> int:
    """The status for a request to this path. The Open Inference Protocol uses 400 for every client
    error.
    """
    if speaks_oip(path) and isinstance(error, Unprocessable):
        return 400
    return error.status


def error_body(error: ServeError, path: str) -> dict[str, Any]:
    """The error body for a request to this path."""
    if speaks_oip(path):
        return {"error": error.message}
    if path.startswith(("/v1/completions", "/v1/chat/", "/v1/embeddings")):
        body = error.body()
        body["error"]["type"] = _openai_type(error.status)
        return body
    return error.body()


def speaks_oip(path: str) -> bool:
    """Whether this path belongs to the Open Inference Protocol."""
    return path == "/v2" or path.startswith("/v2/")


def _openai_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"


ARRIVED_KEY = "stepdial.arrived_s"
USERS_KEY = "stepdial.users"  # the models that the request uses
CROWDED_KEY = "stepdial.crowded"  # there are too many connections
PROBING_KEY = "stepdial.probing"  # it arrived at the port for probes
ENDED_KEY = "stepdial.ended"  # the connection has answered it during shutdown
WHOLE_KEY = "stepdial.whole"  # how our own connections write a whole answer at once
# How a route writes a whole answer; False if the framework has to.
WRITE_KEY = "stepdial.write"
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
_UNWRITTEN = AccessLog(log=False, traces=None)
_log = logging.getLogger("stepdial")
# Ids are not secret, and asking the system for random bytes can make the thread wait.
_ids = random.Random()


class RequestMiddleware:
    """Checks every request, sets its headers, and counts and logs it."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: Keys,
        origins: Collection[str] = (),
        access: AccessLog = _UNWRITTEN,
        takes: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """`takes` tells whether a request that arrived at this time is still accepted."""
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
        # A server in front of this one may have set the time of arrival.
        arrived_s = scope.setdefault(ARRIVED_KEY, time.perf_counter())
        request_id = scope[ID_KEY] = request_id_of(scope)
        own: HeaderList = ((b"x-request-id", request_id.encode()),)
        if self._origins:
            own += cross_origin_headers(scope, self._origins)
        used: list[ModelUsers] = []
        scope[USERS_KEY] = used
        method, status = scope["method"], 0
        if method == "HEAD":  # the same answer as for GET, without the body
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
            if preflight is not None:  # before the key check: browsers send no key with it
                await _send_empty(send_with_headers, preflight)
                return
            try:
                holder = self._admit(scope)
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
                "%s in request %s", "out of memory" if short else "internal error", request_id
            )
            if status:
                raise  # the response has started: only closing the connection tells the client
            bug = InternalError(f"this is our bug; please report it with the id {request_id}")
            await _send_error(send_with_headers, OutOfMemory() if short else bug, scope["path"])
        finally:
            if holder is not None:
                holder.leave()
            for users in used:
                users.count -= 1
            self._count(scope, method, status or CLIENT_GONE, arrived_s)

    def _admit(self, scope: Scope) -> Holder | None:
        """The holder of the request's key, if keys are used; a ServeError refuses the request."""
        if CROWDED_KEY in scope and scope["path"] not in PROBES:
            raise Crowded("too many connections are open to this server: try again in a moment")
        if PROBING_KEY in scope and scope["path"] not in PROBE_PORT_PATHS:
            raise NotFound("this port has the probes and /metrics only")
        if scope["method"] not in _LOOKING and not self._takes(scope[ARRIVED_KEY]):
            raise Draining("the server is shutting down: send the request to another")
        refusal = check_origin(scope, self._origins)
        if refusal is not None:
            raise refusal
        return authenticate(scope, self._keys) if self._keys else None

    def _count(self, scope: Scope, method: str, status: int, arrived_s: float) -> None:
        ended_s = time.perf_counter()
        route = getattr(scope.get("route"), "path", "none")
        model, steps = scope.get(SERVED_KEY, ("", None))
        self._metrics.requests.labels(route, model, str(status)).inc()
        if status < 400:
            rung = "" if steps is None else str(steps)
            self._metrics.request_seconds.labels(route, model, rung).observe(ended_s - arrived_s)
        else:  # errors have no step count
            refused = self._metrics.refused_seconds.labels(route, model, str(status))
            refused.observe(ended_s - arrived_s)
        self._access.write(scope, method, status, arrived_s, ended_s)


def use_model(scope: Scope, users: ModelUsers) -> None:
    """Count the request as a user of this model until it ends, even if the model is replaced."""
    users.count += 1
    scope[USERS_KEY].append(users)


def request_id_of(scope: Scope) -> str:
    """The request's own id if it is safe to repeat, else a new one."""
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
