"""What a client may send and how long it may take, and what is wrong with the head of a request.

Knows numbers; deliberately neither sockets nor how requests are read.
"""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass

from serve.errors import BadHttp, HeadersTooLarge, ServeError, UrlTooLong
from serve.settings import Settings
from serve.wire.origin import Header


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of each connection; `connections` is how many there may be."""

    connections: int
    headers: int
    header_bytes: int
    header_timeout_s: float
    body_bytes: int
    body_timeout_s: float
    send_timeout_s: float
    count_refusal: Callable[[str], None]  # told the code of the error

    @classmethod
    def of(
        cls, settings: Settings, connections: int, count_refusal: Callable[[str], None]
    ) -> "ConnectionLimits":
        """The part of the settings that concerns connections."""
        return cls(
            connections=connections,
            headers=settings.max_headers,
            header_bytes=settings.max_header_bytes,
            header_timeout_s=settings.header_timeout_s,
            body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            send_timeout_s=settings.send_timeout_s,
            count_refusal=count_refusal,
        )

    def problem_of_head(self, url: bytes, headers: Sized, size: int) -> ServeError | None:
        """What is too much in a head of so many bytes; None if nothing is."""
        if len(headers) > self.headers:
            return HeadersTooLarge(f"a request may have {self.headers} headers: send fewer")
        if size <= self.header_bytes:
            return None
        if len(url) > self.header_bytes // 2:
            return UrlTooLong("the URL is too long: send what it holds in the body")
        return HeadersTooLarge(f"the headers are larger than {self.header_bytes} bytes: send less")


def problem_of_host(version: str, headers: Sequence[Header]) -> ServeError | None:
    """What is wrong with the name that the server is asked for by; None if nothing is."""
    named = [name for name, _ in headers].count(b"host")
    if named == 1 or (named == 0 and version == "1.0"):
        return None
    return BadHttp(f"a request needs one Host header: this one has {named or 'none'}")
