"""Whether a page of another address sends a request: any page that a browser shows could.

Knows the headers that browsers set and pages cannot; deliberately no route. Programs send no
Origin, so this never concerns them.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from serve.errors import CrossOrigin

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_SHOWN = 100


def cross_origin(scope: Scope) -> CrossOrigin | None:
    """The refusal of a request whose Origin is not the host that it came to."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    # Behind a proxy the host may have changed on the way; a page can set neither of these.
    if origin is None or headers.get("sec-fetch-site") == "same-origin":
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
