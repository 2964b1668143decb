"""What clients may send, how long they may take, and how many of them there may be at once.

Knows numbers and addresses, neither sockets nor how requests are read.
"""

import ipaddress
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Protocol

from serve.errors import (
    BadHttp,
    HeadersTooLarge,
    ServeError,
    UnsupportedCoding,
    UrlTooLong,
)
from serve.settings import Settings
from serve.wire.origin import Header

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of each connection; `connections` is how many there may be."""

    connections: int
    address_connections: int  # of one client address
    proxies: tuple[Network, ...]  # addresses that this does not hold for
    headers: int
    header_bytes: int
    header_timeout_s: float
    body_bytes: int
    body_timeout_s: float
    send_timeout_s: float
    count_refusal: Callable[[str], None]  # told the code of the error
    count_eviction: Callable[[], None] = field(default=lambda: None)

    @classmethod
    def of(
        cls,
        settings: Settings,
        connections: int,
        count_refusal: Callable[[str], None],
        count_eviction: Callable[[], None] = lambda: None,
    ) -> "ConnectionLimits":
        """The part of the settings that concerns connections."""
        return cls(
            connections=connections,
            address_connections=settings.max_address_connections or max(1, connections // 2),
            proxies=tuple(map(ipaddress.ip_network, settings.trusted_proxies)),
            headers=settings.max_headers,
            header_bytes=settings.max_header_bytes,
            header_timeout_s=settings.header_timeout_s,
            body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            send_timeout_s=settings.send_timeout_s,
            count_refusal=count_refusal,
            count_eviction=count_eviction,
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

    def problem_of_trailers(self, number: int, size: int) -> ServeError | None:
        """What is too much in so many trailers of so many bytes; None if nothing is."""
        if number <= self.headers and size <= self.header_bytes:
            return None
        return HeadersTooLarge(
            "what follows the body is larger than the headers may be: send no trailers"
        )


def problem_of_headers(version: str, headers: Sequence[Header]) -> ServeError | None:
    """What is wrong with the host that is asked for, or with how the body is sent, if anything."""
    hosts, codings = 0, []
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if codings and codings != [b"chunked"]:
        return UnsupportedCoding("the body is sent in a coding other than chunked: send it plain")
    if hosts == 1 or (hosts == 0 and version == "1.0"):
        return None
    return BadHttp(f"a request needs one Host header: this one has {hosts or 'none'}")


class Guest(Protocol):
    """A connection, as Crowd sees it."""

    def may_go(self) -> bool:
        """Whether nothing is lost that it was sent."""

    def make_room(self) -> None:
        """Close it for another."""


class Crowd:
    """The connections there are. Where there are too many, those idle longest make room.

    A connection is idle while no request on it waits for its answer.
    """

    def __init__(self, most: int, of_address: int, proxies: Sequence[Network]) -> None:
        self._most = most
        self._of_address = of_address
        self._proxies = proxies
        self._addresses: dict[Guest, str | None] = {}  # None: as many as there may be at all
        self._held: dict[str, int] = {}
        self._idle: dict[Guest, None] = {}  # longest first
        self._spare: set[Guest] = set()

    @property
    def spare(self) -> int:
        """How many there are for whom no other made room."""
        return len(self._spare)

    def enter(self, guest: Guest, host: str | None) -> bool:
        """Whether there is room for a new connection of this address."""
        address = self._counted(host)
        self._addresses[guest] = address
        room = True
        if address is not None:
            self._held[address] = self._held.get(address, 0) + 1
            if self._held[address] > self._of_address:
                room = self._make_room(address)
        if room and len(self._addresses) > self._most:
            room = self._make_room(None)
        self._idle[guest] = None
        if not room:
            self._spare.add(guest)
        return room

    def busy(self, guest: Guest) -> None:
        """A request came on this connection."""
        self._idle.pop(guest, None)

    def idle(self, guest: Guest) -> None:
        """All requests of this connection were answered."""
        if guest in self._addresses:
            self._idle[guest] = None

    def leave(self, guest: Guest) -> None:
        """The connection is over. This may be told twice."""
        if guest not in self._addresses:
            return
        address = self._addresses.pop(guest)
        self._idle.pop(guest, None)
        self._spare.discard(guest)
        if address is not None:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def _make_room(self, address: str | None) -> bool:
        """Close the one that has been idle longest, of this address if one is given."""
        for guest in self._idle:
            if address is not None and self._addresses[guest] != address:
                continue
            if guest.may_go():
                self.leave(guest)
                guest.make_room()
                return True
        return False

    def _counted(self, host: str | None) -> str | None:
        try:
            address = ipaddress.ip_address(host or "")
        except ValueError:  # of no network
            return None
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        if any(address in network for network in self._proxies):
            return None
        if isinstance(address, ipaddress.IPv6Address):  # one client usually has a whole network
            return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
        return str(address)
