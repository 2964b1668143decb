"""One connection of a client: what it may send, and how long it may take.

uvicorn reads the protocol; this adds the limits that it has none of, so that no client can hold
memory or a connection without end. A disconnect is noticed here.
"""

import asyncio
import ipaddress
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any, ClassVar, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from serve.api.body import WHOLE_BODY_KEY
from serve.api.submission import DISCONNECT_KEY, Disconnect
from serve.errors import (
    BadHttp,
    Crowded,
    HeadersTooLarge,
    RequestTimeout,
    ServeError,
    UnsupportedCoding,
    UrlTooLong,
)
from serve.middleware import (
    ARRIVED_KEY,
    CROWDED_KEY,
    ENDED_KEY,
    PROBING_KEY,
    SECURITY_HEADERS,
    WHOLE_KEY,
    Header,
    HeaderList,
    error_body,
)
from serve.settings import Settings

# What clients may send, how long they may take, and how many of them there may be at once.


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


class TrackedConnection(Protocol):
    """A connection, as Crowd sees it."""

    def may_go(self) -> bool:
        """Whether nothing is lost that it was sent."""

    def make_room(self) -> None:
        """Close it for another."""


class ConnectionTable:
    """The connections there are. Where there are too many, those idle longest make room.

    A connection is idle while no request on it waits for its answer.
    """

    def __init__(self, most: int, of_address: int, proxies: Sequence[Network]) -> None:
        self._most = most
        self._of_address = of_address
        self._proxies = proxies
        self._addresses: dict[
            TrackedConnection, str | None
        ] = {}  # None: as many as there may be at all
        self._held: dict[str, int] = {}
        self._idle: dict[TrackedConnection, None] = {}  # longest first
        self._spare: set[TrackedConnection] = set()

    @property
    def spare(self) -> int:
        """How many there are for whom no other made room."""
        return len(self._spare)

    def enter(self, connection: TrackedConnection, host: str | None) -> bool:
        """Whether there is room for a new connection of this address."""
        address = self._counted(host)
        self._addresses[connection] = address
        room = True
        if address is not None:
            self._held[address] = self._held.get(address, 0) + 1
            if self._held[address] > self._of_address:
                room = self._make_room(address)
        if room and len(self._addresses) > self._most:
            room = self._make_room(None)
        self._idle[connection] = None
        if not room:
            self._spare.add(connection)
        return room

    def busy(self, connection: TrackedConnection) -> None:
        """A request came on this connection."""
        self._idle.pop(connection, None)

    def idle(self, connection: TrackedConnection) -> None:
        """All requests of this connection were answered."""
        if connection in self._addresses:
            self._idle[connection] = None

    def leave(self, connection: TrackedConnection) -> None:
        """The connection is over. This may be told twice."""
        if connection not in self._addresses:
            return
        address = self._addresses.pop(connection)
        self._idle.pop(connection, None)
        self._spare.discard(connection)
        if address is not None:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def _make_room(self, address: str | None) -> bool:
        """Close the one that has been idle longest, of this address if one is given."""
        for connection in self._idle:
            if address is not None and self._addresses[connection] != address:
                continue
            if connection.may_go():
                self.leave(connection)
                connection.make_room()
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


# Connections beyond the limit on which probes are answered all the same.
_FOR_PROBES = 64
# Connections of the port that is for probes only.
_PROBING = 64
# Requests that may wait behind another on one connection; no client that is known sends so many.
_MAX_PIPELINED = 64
# What has no body that could still be on its way, and asks no model.
_LOOKING = ("GET", "HEAD")
# When the server ends, for what was answered to reach clients; less than uvicorn waits.
_LAST_READ_S = 1.5
# On, for no time: closing drops what was not sent.
_NO_LINGER = struct.pack("ii", 1, 0)


class _ParserState(Enum):
    """What comes next from the client."""

    NOTHING = auto()  # no request has begun
    HEAD = auto()
    BODY = auto()


# Looked up several times a request, which an enumeration is slow at.
_NOTHING, _HEAD, _BODY = _ParserState


class LimitedProtocol(HttpToolsProtocol):
    """A connection within limits; a subclass made by `limited` sets them."""

    limits: ClassVar[ConnectionLimits]
    everybody: ClassVar[ConnectionTable]
    probing: ClassVar[ConnectionTable]  # on a port of their own
    health_port: ClassVar[int | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading = _NOTHING
        self._chunk_bytes = 0  # that came last
        self._head_bytes = 0  # that came since the head began, without the chunk it began in
        self._ignored_bytes = 0
        self._trailers = self._trailer_bytes = 0
        self._between_bytes = 0  # that came since the last byte of the body
        self._table = self.everybody
        self._crowded = False
        self._deaf = False  # nothing that still comes is read
        self._problem: ServeError | None = None  # what a callback of the parser found
        self._answering: RequestResponseCycle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # Connection

    # uvicorn narrows the type of asyncio's protocol in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.health_port is not None and self.server and self.server[1] == self.health_port:
            self._table = self.probing
        self._crowded = not self._table.enter(self, self.client[0] if self.client else None)
        if self._crowded and self._table.spare > _FOR_PROBES:
            self._refuse(Crowded("too many connections are open: try again in a moment"))
        else:
            self._await_bytes(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.leave(self)
        self._stop_reading_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()
        super().connection_lost(exc)
        # uvicorn tells only the last request of a pipeline that its client has gone.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
            cast(dict[str, Any], self._answering.scope)[DISCONNECT_KEY].happen()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._chunk_bytes = len(data)
        if self._reading is _HEAD:
            self._head_bytes += self._chunk_bytes
        elif self._reading is _BODY:
            self._between_bytes += self._chunk_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end_after_answer()  # the request is answered as if it had not asked for that
            return
        except httptools.HttpParserError:
            self._refuse(self._problem or BadHttp("this is not a request of HTTP/1.1"))
            return
        if self._reading is _HEAD:
            problem = self.limits.problem_of_head(self.url, self.headers, self._head_bytes)
            if problem is not None:
                self._refuse(problem)
            elif self._read_timer is None:
                self._await_bytes(self.limits.header_timeout_s)
        elif self._reading is _BODY:
            # What the parser keeps until it is whole: a trailer, or what a chunk says of itself.
            problem = self.limits.problem_of_trailers(self._trailers, self._between_bytes)
            if problem is not None:
                self._refuse(problem)
        elif self._reading is _NOTHING and self._idle:
            self._await_next_request()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """Whether to stay open for a client that sends no more.

        One that left looks the same, so no model works for either; to look something up costs
        next to nothing, and is answered.
        """
        unanswered = [self._answering, *(cycle for cycle, _ in self.pipeline)]
        stay = not self._idle and all(
            cycle is not None and cycle.scope["method"] in _LOOKING for cycle in unanswered
        )
        if stay:
            self._end_after_answer()
        return stay

    # Parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = _HEAD
        self._head_bytes = 0
        scope = cast(dict[str, object], self.scope)
        # The application is told later: after whatever else the loop has read by then.
        scope[ARRIVED_KEY] = time.perf_counter()
        scope[DISCONNECT_KEY] = Disconnect()
        scope[WHOLE_KEY] = self._write_whole
        if self._crowded:
            scope[CROWDED_KEY] = True
        if self._table is self.probing:
            scope[PROBING_KEY] = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not _BODY:
            super().on_header(name, value)
            return
        # A trailer, which is not for whoever reads headers.
        self._trailers += 1
        self._trailer_bytes += len(name) + len(value)
        self._problem = self.limits.problem_of_trailers(self._trailers, self._trailer_bytes)
        if self._problem is not None:
            raise self._problem

    def on_headers_complete(self) -> None:
        size = self._head_bytes + self._chunk_bytes
        if size > self.limits.header_bytes:  # perhaps, since a chunk may hold other things too
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._problem = self.limits.problem_of_head(self.url, self.headers, size)
        if self._problem is None:
            self._problem = problem_of_headers(self.parser.get_http_version(), self.headers)
        if self._problem is None and len(self.pipeline) >= _MAX_PIPELINED:
            self._problem = BadHttp("too many requests were sent ahead: wait for answers")
        if self._problem is not None:
            raise self._problem
        self._stop_reading_timer()
        waits = not self._idle
        super().on_headers_complete()
        self._reading = _BODY
        self._trailers = self._trailer_bytes = self._between_bytes = 0
        self._table.busy(self)
        if not waits:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._between_bytes = 0
        if self.cycle.response_complete:
            self._ignored_bytes += len(body)
            if self._ignored_bytes > self.limits.body_bytes:
                self._close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        cast(dict[str, object], self.scope)[WHOLE_BODY_KEY] = self._take_body
        self._reading = _NOTHING
        self._ignored_bytes = 0
        self._stop_reading_timer()

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is None:
            self._table.idle(self)
        if self.transport.is_closing():
            self._await_reader()
        elif following is not None:
            self._answering = following
        elif self._reading is _BODY:
            # Answered before its body had come, which nobody reads any more.
            self._await_bytes(self.limits.body_timeout_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = self._undivided(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _take_body(self) -> bytes | None:
        """A body that has come as a whole; None if the client has left meanwhile."""
        cycle = self._answering
        assert cycle is not None  # an application asks
        if cycle.disconnected or cycle.response_complete:
            return None
        self.flow.resume_reading()
        cycle.message_event.clear()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    # Writing

    def _write_whole(
        self, status: int, headers: Sequence[Header], always: HeaderList, body: bytes
    ) -> bool:
        """Write an answer in one piece, its head and its body together.

        uvicorn writes the two one after the other, which takes a system call and a packet more,
        and looks through every header that the server itself made. False if the answer has to go
        that way all the same. `always` are headers that other answers have as well.
        """
        cycle = self._answering
        assert cycle is not None  # an application asks
        if cycle.disconnected or cycle.response_started or self.flow.write_paused:
            return False
        head = _lines([*cycle.default_headers, *headers]) + _same_lines(always)
        if not cycle.keep_alive:
            head += b"connection: close\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n", body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    @staticmethod
    def _undivided(cycle: RequestResponseCycle, app: Any) -> Any:
        """The application, for a client of HTTP/1.0: it has no chunks, which uvicorn sends to all.

        The end of the connection ends its body.
        """
        cycle.chunked_encoding = False
        # Such a client sends its body anyway, and takes what is told meanwhile for the answer.
        cycle.waiting_for_100_continue = False

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_undivided(message: Any) -> None:
                if message["type"] == "http.response.body":
                    # As uvicorn counts down how much is still to come.
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            await app(scope, receive, send_undivided)

        return answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(always=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(_LAST_READ_S, self._cut)

    # The end of the server

    def unfinished(self, since_s: float) -> bool:
        """Whether a client still waits for something that had begun to come at that time."""
        if self._table is self.probing:
            return False
        if self._reading is _HEAD and not self._deaf:
            begun_s: float = cast(dict[str, Any], self.scope)[ARRIVED_KEY]
            if begun_s <= since_s:
                return True
        if not self._idle and self._answering is not None:  # those behind it came later still
            arrived_s: float = cast(dict[str, Any], self._answering.scope)[ARRIVED_KEY]
            return arrived_s <= since_s
        return self.transport.get_write_buffer_size() > 0

    def end(self, problem: ServeError) -> None:
        """Answer with this error what is unanswered; what has half been answered is cut off."""
        cycle = self._answering
        if self.transport.is_closing():
            return
        if cycle is None or self._idle:
            if self._reading is _HEAD:
                self._refuse(problem)
            return
        scope = cast(dict[str, Any], cycle.scope)
        scope[ENDED_KEY] = True  # before the application hears of it
        if not cycle.response_started:
            self.limits.count_refusal(problem.code)
            self.transport.write(refusal(problem, scope["path"]))
        cycle.disconnected = True
        cycle.message_event.set()
        self._close()

    # Room for others

    def may_go(self) -> bool:
        return self.transport.get_write_buffer_size() == 0

    def make_room(self) -> None:
        self.limits.count_eviction()
        if self._reading is _HEAD and self._idle:
            self._refuse(Crowded("too many connections are open: try again in a moment"))
        else:
            self._close()

    # Ends

    @property
    def _idle(self) -> bool:
        """Whether every request that came is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, problem: ServeError) -> None:
        """Say what is wrong with what came, after the answers to what came before, and close."""
        self.limits.count_refusal(problem.code)
        behind = self._reading is _BODY and self._answering is not self.cycle
        if behind:  # of a request that waits for its turn, which never comes
            assert self._answering is not None
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        if behind or (not self._idle and self._reading is not _BODY):
            self._end_after_answer()
            return
        # What is wrong is in a body: nothing may be written into another answer that has begun.
        begun = self._answering is not None and self._answering.response_started
        unasked = self._idle and self._reading is not _BODY
        if unasked or (self._answering is self.cycle and not begun):
            path = self.url.partition(b"?")[0].decode("latin-1") if self.scope else ""
            self.transport.write(refusal(problem, path))
        self._close()

    def _end_after_answer(self) -> None:
        self._deaf = True
        if self._idle:
            self._close()
        else:
            self.cycle.keep_alive = False

    def _close(self) -> None:
        self._deaf = True
        self._stop_reading_timer()
        self.transport.close()
        self._await_reader()

    # Timers

    def _await_bytes(self, timeout_s: float) -> None:
        self._stop_reading_timer()
        self._read_timer = self.loop.call_later(timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._read_timer = None
        if self.transport.is_closing():
            return
        if self._reading is _HEAD:
            limit_s = self.limits.header_timeout_s
            self._refuse(RequestTimeout(f"the headers did not arrive within {limit_s:g} s"))
        else:
            self._close()

    def _await_next_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _await_reader(self, always: bool = False) -> None:
        """Cut the connection if the client does not read what is still to be sent."""
        if self._send_timer is None and (always or self.transport.get_write_buffer_size()):
            self._send_timer = self.loop.call_later(self.limits.send_timeout_s, self._cut)

    def _cut(self) -> None:
        if self not in self.connections:  # it is gone
            return
        # Otherwise the system would go on holding what it has taken for this client.
        own: socket.socket = self.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def limited(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """The kind of connection that uvicorn makes for each client."""
    everybody = ConnectionTable(limits.connections, limits.address_connections, limits.proxies)
    shared = {
        "limits": limits,
        "everybody": everybody,
        "probing": ConnectionTable(_PROBING, _PROBING, ()),
    }
    return type("Connection", (LimitedProtocol,), shared)


def refusal(problem: ServeError, path: str) -> bytes:
    """A whole answer, for clients that no application ever hears of."""
    body = json.dumps(error_body(problem, path)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *SECURITY_HEADERS,
    ]
    headers += [
        (name.encode(), value.encode())
        for name, value in problem.headers().items()
        if name != "connection"
    ]
    lines = [name + b": " + value for name, value in headers]
    return STATUS_LINE[problem.status] + b"\r\n".join([*lines, b"", body])


def _lines(headers: Sequence[Header]) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") + lines.count(b"\r") > 2 * len(headers):
        raise RuntimeError("a header holds the end of a line")
    return lines


_same_lines = lru_cache(maxsize=8)(_lines)
