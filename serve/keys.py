"""API keys: who may send requests, and how much each key may use.

Keys are kept only as SHA-256 digests, which is enough because keys are random.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import shlex
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.errors import ConcurrencyLimited, RateLimited, TokensForbidden, TokensLimited
from serve.settings import KEYS_VARIABLE, SettingsError

# Prefix of every key, so that people and secret scanners recognise one.
_PREFIX = "sd-"
_SECRET_BYTES = 32
# Shorter keys could be guessed from their digest.
_MIN_CHARACTERS = 20
_MAX_CHARACTERS = 256
_VISIBLE = re.compile(r"[!-~]+")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Retry-After for a key whose requests all run, since the time when one will end is not known.
_TRY_AGAIN_S = 1.0


class KeysError(SettingsError):
    """Keys that cannot be used. The message says where and why, and never shows a key."""


class Key(BaseModel):
    """What is kept of a key, and its limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@ -]+$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    max_steps: Annotated[int, Field(ge=1)] | None = None
    requests_per_s: Annotated[float, Field(gt=0)] | None = None
    # Requests that may arrive at once after a pause.
    burst: Annotated[int, Field(ge=1)] = 10
    # Tokens read and generated; a minute's worth may be used at once after a pause.
    tokens_per_min: Annotated[int, Field(ge=1)] | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None


class TokenBucket:
    """A rate limit: it holds up to `most` and gains `each_s` per second."""

    def __init__(self, most: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = most
        self._counted_s = clock()

    def take(self, amount: float, most: float, each_s: float) -> float:
        """Take this much: 0 if it was there, else the seconds until it will be."""
        now_s = self._clock()
        self._left = min(most, self._left + (now_s - self._counted_s) * each_s)
        self._counted_s = now_s
        if self._left < amount:
            return (amount - self._left) / each_s
        self._left -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """Return what was not used."""
        self._left += amount


class Holder:
    """The user of a key: running requests and remaining limits."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._running = 0
        self._requests = TokenBucket(float(key.burst), clock)
        self._tokens = TokenBucket(float(key.tokens_per_min or 0), clock)

    def enter(self) -> None:
        """Count a request in; RateLimited or ConcurrencyLimited if it is one too many."""
        most = self.key.max_concurrent
        if most is not None and self._running >= most:
            raise ConcurrencyLimited(
                f"{most} requests with this API key run, which is the most it may: wait for one",
                retry_after_s=_TRY_AGAIN_S,
            )
        if self.key.requests_per_s is not None:
            wait_s = self._requests.take(1, float(self.key.burst), self.key.requests_per_s)
            if wait_s:
                raise RateLimited(
                    f"this API key may send {self.key.requests_per_s:g} requests a second: wait as "
                    "long as Retry-After says",
                    retry_after_s=wait_s,
                )
        self._running += 1

    def leave(self) -> None:
        """Count a request out."""
        self._running -= 1

    def spend_tokens(self, tokens: int) -> None:
        """Reserve the tokens of a request; TokensLimited or TokensForbidden if that is too many."""
        most = self.key.tokens_per_min
        if most is None:
            return
        if tokens > most:
            raise TokensForbidden(
                f"this asks for {tokens} tokens, read and written, and the API key may have {most} "
                "a minute: lower max_tokens, or send less at once"
            )
        wait_s = self._tokens.take(tokens, float(most), most / 60)
        if wait_s:
            raise TokensLimited(
                f"this API key may have {most} tokens a minute, read and written, and fewer than "
                f"the {tokens} that this asks for are left: wait as long as Retry-After says, or "
                "lower max_tokens",
                retry_after_s=wait_s,
            )

    def return_tokens(self, tokens: int) -> None:
        """Return reserved tokens that were not used."""
        if self.key.tokens_per_min is not None:
            self._tokens.give_back(tokens)


class Keys:
    """The known keys. Without any, everybody may use the server."""

    def __init__(
        self,
        path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        variable: str = KEYS_VARIABLE,
    ) -> None:
        self._path = path
        self._fixed = _from_environment(os.environ if environ is None else environ, variable)
        self._holders: dict[bytes, Holder] = {}  # by the digest of their key
        self.in_use = False  # whether requests need a key
        self.read_again()

    def read_again(self) -> None:
        """Read the file again; KeysError, and no change, if it cannot be used."""
        listed = [*self._fixed, *(_from_file(self._path) if self._path is not None else ())]
        _check_alike(listed)
        holders = {}
        for key in listed:
            digest = bytes.fromhex(key.sha256)
            # Keys that stay keep their counts.
            holders[digest] = self._holders.get(digest) or Holder(key)
            holders[digest].key = key
        self._holders = holders
        self.in_use = bool(holders)

    def holder_of(self, secret: bytes) -> Holder | None:
        """The holder of this key. Every key is compared, so that timing reveals nothing."""
        if len(secret) > _MAX_CHARACTERS:
            return None
        digest = hashlib.sha256(secret).digest()
        found = None
        for known, holder in self._holders.items():
            if hmac.compare_digest(known, digest):
                found = holder
        return found


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new random key, and its entry for the keys file."""

    secret: str
    block: str

    @classmethod
    def draw(cls, name: str) -> Self:
        """A new key; KeysError if the name is not usable."""
        secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        key = _checked({"name": name, "sha256": _digest(secret)}, "the new key")
        return cls(secret, f'[[key]]\nname = "{key.name}"\nsha256 = "{key.sha256}"\n')


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _from_environment(environ: Mapping[str, str], variable: str) -> list[Key]:
    text = environ.get(variable)
    if text is None:
        return []
    keys = []
    for number, word in enumerate(text.split(","), 1):
        secret = word.strip()
        if not _MIN_CHARACTERS <= len(secret) <= _MAX_CHARACTERS or not _VISIBLE.fullmatch(secret):
            raise KeysError(
                f"key {number} of {variable} is not {_MIN_CHARACTERS} to {_MAX_CHARACTERS} "
                "visible ASCII characters: make one with `stepdial serve --make-key NAME`, or "
                "unset the variable"
            )
        keys.append(Key(name=f"environment-{number}", sha256=_digest(secret)))
    return keys


def _from_file(path: Path) -> list[Key]:
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS_MAY_WRITE:
                raise KeysError(
                    f"others may write the API keys in {path}: run "
                    f"`chmod go-w {shlex.quote(str(path))}`"
                )
            document = tomllib.loads(file.read())
    except KeysError:
        raise
    except OSError as error:
        raise KeysError(f"cannot read the API keys in {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        # Only where the TOML error is: the line itself may hold a key.
        where = str(error).splitlines()[0]
        raise KeysError(f"the API keys in {path} are not TOML: {where}") from None
    listed = document.pop("key", None)
    if document or not isinstance(listed, list) or not listed:
        raise KeysError(
            f"{path} must hold tables [[key]], at least one, and nothing else: make one with "
            "`stepdial serve --make-key NAME`"
        )
    return [_checked(given, f"key {number} of {path}") for number, given in enumerate(listed, 1)]


def _checked(given: Any, where: str) -> Key:
    try:
        return Key.model_validate(given)
    except ValidationError as error:
        # Without the input: it may be a key put in place of its digest.
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"])) or "it"
        raise KeysError(
            f"{where}: {field}: {problem['msg']}; it has {', '.join(Key.model_fields)}"
        ) from None


def _check_alike(keys: list[Key]) -> None:
    for field in ("name", "sha256"):
        seen: dict[str, str] = {}
        for key in keys:
            value = getattr(key, field)
            if value in seen:
                raise KeysError(
                    f"the API keys {seen[value]!r} and {key.name!r} have the same {field}: "
                    "each needs its own"
                )
            seen[value] = key.name


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
