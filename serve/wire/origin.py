"""Whether a page of another address sends a request: any page that a browser shows could.

Those of the settings may (CORS), others are refused. Knows the headers that browsers set and pages
cannot; deliberately no route. Programs send no Origin, so this never concerns them.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from serve.errors import CrossOrigin

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_SHOWN = 100

Header = tuple[bytes, bytes]
HeaderList = tuple[Header, ...]
# Without credentials: a key is a header that the page itself sets, never one that a browser adds.
_PREFLIGHT: HeaderList = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, *"),  # the star leaves that one out
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
    """What lets a page of an allowed origin read the answer."""
    if not allowed:
        return ()
    origin = Headers(scope=scope).get("origin")
    if origin is None or origin not in allowed:
        return (_VARY,)
    return ((b"access-control-allow-origin", origin.encode()), _VARY, *_READABLE)


def preflight_headers(scope: Scope, allowed: Collection[str]) -> HeaderList | None:
    """The answer to a browser that asks whether a page may send a request; None if none asks."""
    if scope["method"] != "OPTIONS" or not allowed:
        return None
    headers = Headers(scope=scope)
    if headers.get("origin") not in allowed or "access-control-request-method" not in headers:
        return None
    return _PREFLIGHT


def cross_origin(scope: Scope, allowed: Collection[str] = ()) -> CrossOrigin | None:
    """The refusal of a request whose Origin is neither the host that it came to nor allowed."""
    if b"origin" not in dict(scope["headers"]):  # as of every program
        return None
    headers = Headers(scope=scope)
    origin = headers["origin"]
    # Behind a proxy the host may have changed on the way; a page can set neither of these.
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
