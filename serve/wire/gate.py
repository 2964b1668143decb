"""Who is let in: the API key of a request, found in its headers and held against those there are.

Every path is guarded but those of the probes, so that a route added later is guarded too. Knows
headers; deliberately neither routes nor what is kept of a key.
"""

import base64
import binascii
from collections.abc import Iterable

from starlette.types import Scope

from serve.errors import Unauthorized
from serve.keys import Holder, Keys

HOLDER_KEY = "stepdial.holder"
# Guarded by the routes themselves, with keys of their own.
OWN_KEYS = "/admin/"
# How browsers mark what a script of a page asks for.
_OF_SCRIPTS = ((b"sec-fetch-mode", b"cors"), (b"sec-fetch-mode", b"same-origin"))
PROBES = frozenset(
    {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
)
# What is there at the port of probes, and leaves no traces.
WATCHED = PROBES | {"/metrics"}


def enter(scope: Scope, keys: Keys) -> Holder | None:
    """Whoever sends this request, counted in; None for probes.

    Unauthorized without a key that is known; RateLimited or ConcurrencyLimited with one that has
    spent what it has.
    """
    if scope["path"] in PROBES or scope["path"].startswith(OWN_KEYS):
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
    """The most steps that the key of this request may have, if there is such a limit."""
    holder: Holder | None = scope.get(HOLDER_KEY)
    return None if holder is None else holder.key.max_steps


def spend_tokens(scope: Scope, tokens: int) -> None:
    """Take what a request may read and write from its key; TokensLimited if that is too much."""
    holder: Holder | None = scope.get(HOLDER_KEY)
    if holder is not None:
        holder.spend_tokens(tokens)


def return_tokens(scope: Scope, tokens: int) -> None:
    """So many of those were not used."""
    holder: Holder | None = scope.get(HOLDER_KEY)
    if holder is not None:
        holder.return_tokens(tokens)


def secret_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request carries, if it carries one."""
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
