"""Client connections: limits on what a client may send and how long it may take.

uvicorn parses HTTP; this adds limits, so that no client can hold memory or a connection for ever,
and notices a disconnect.
"""

import asyncio
import fcntl
import ipaddress
import json
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Any, ClassVar, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from serve.errors import (
    BadHttp,
    Crowded,
    HeadersTooLarge,
    RequestTimeout,
    ServeError,
    UnsupportedCoding,
    UrlTooLong,
    error_body,
)
from serve.exchange import EXCHANGE_KEY, Exchange, Header, HeaderList
from serve.middleware import SECURITY_HEADERS, note_refusal, request_id_of
from serve.settings import Settings

# Limits.


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def problem_of_head(settings: Settings, url: bytes, headers: Sized, size: int) -> ServeError | None:
    """What is too large in a request head of this many bytes; None if nothing is."""
    if len(headers) > settings.max_headers:
        return HeadersTooLarge(f"a request may have {settings.max_headers} headers: send fewer")
    most_bytes = settings.max_header_bytes
    if len(url) > most_bytes // 2:
        return UrlTooLong("the URL is too long: send what it holds in the body")
    if size <= most_bytes:
        return None
    return HeadersTooLarge(f"the headers are larger than {most_bytes} bytes: send less")


def problem_of_trailers(settings: Settings, number: int, size: int) -> ServeError | None:
    """What is too large in trailers of this many bytes; None if nothing is."""
    if number <= settings.max_headers and size <= settings.max_header_bytes:
        return None
    return HeadersTooLarge(
        "what follows the body is larger than the headers may be: send no trailers"
    )


def problem_of_headers(version: str, headers: Sequence[Header]) -> ServeError | None:
    """What is wrong with the Host header or the transfer coding, if anything is."""
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
    """A connection, as the ConnectionTable sees it."""

    def may_go(self) -> bool:
        """Whether it can be closed without losing a request."""

    def make_room(self) -> None:
        """Close it to make room for another."""


class ConnectionTable:
    """The open connections. When there are too many, those idle longest are closed.

    A connection is idle while no request on it waits for an answer.
    """

    def __init__(self, most: int, of_address: int, proxies: Sequence[Network]) -> None:
        self._most = most
        self._of_address = of_address
        self._proxies = proxies
        self._addresses: dict[TrackedConnection, str | None] = {}  # None: no limit per address
        self._held: dict[str, int] = {}
        self._idle: dict[TrackedConnection, None] = {}  # longest first
        self._spare: set[TrackedConnection] = set()

    @property
    def spare(self) -> int:
        """The number of connections above the limit."""
        return len(self._spare)

    def enter(self, connection: TrackedConnection, host: str | None) -> bool:
        """Add a connection of this address; False if there is no room for it."""
        address = self._counted(host)
        self._addresses[connection] = address
        room = True
        if address is not None:
            self._held[address] = self._held.get(address, 0) + 1
            if self._held[address] > self._of_address:
                room = self._close_idle(address)
        if room and len(self._addresses) > self._most:
            room = self._close_idle()
        if not room:
            if len(self._spare) >= _FOR_PROBES:
                self._close_idle(spare=True)
            self._spare.add(connection)
        self._idle[connection] = None
        return room

    def busy(self, connection: TrackedConnection) -> None:
        """A request arrived on this connection."""
        self._idle.pop(connection, None)

    def idle(self, connection: TrackedConnection) -> None:
        """Every request of this connection is answered."""
        if connection in self._addresses:
            self._idle[connection] = None

    def leave(self, connection: TrackedConnection) -> None:
        """The connection is closed. May be called twice."""
        if connection not in self._addresses:
            return
        address = self._addresses.pop(connection)
        self._idle.pop(connection, None)
        self._spare.discard(connection)
        if address is not None:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def _close_idle(self, address: str | None = None, spare: bool = False) -> bool:
        """Close the connection idle longest, of this address if one is given; False if none is.

        To close one above the limit makes no room below it, only among those above.
        """
        for connection in self._idle:
            if (connection in self._spare) != spare:
                continue
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
        except ValueError:  # not an IP address
            return None
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        if any(address in network for network in self._proxies):
            return None
        if isinstance(address, ipaddress.IPv6Address):  # one client usually has a whole /64
            return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
        return str(address)


# Connections above the limit that still get answers to probes.
_FOR_PROBES = 64
# Connections of the port for probes.
_PROBING = 64
# Pipelined requests that may wait on one connection; no known client sends as many.
_MAX_PIPELINED = 64
# Methods without a body, which run no model.
_LOOKING = ("GET", "HEAD")
# At shutdown, time for answers to reach clients; less than uvicorn waits.
_LAST_READ_S = 1.5
# SO_LINGER on, with time 0: closing drops what was not sent.
_NO_LINGER = struct.pack("ii", 1, 0)


# What the client sends next; nothing before a request has started.
_NOTHING, _HEAD, _BODY = range(3)


class LimitedProtocol(HttpToolsProtocol):
    """A connection within limits; `limited` makes a subclass that sets them."""

    settings: ClassVar[Settings]
    count_refusal: ClassVar["staticmethod[[str], None]"]  # called with the code of the error
    count_eviction: ClassVar["staticmethod[[], None]"]
    everybody: ClassVar[ConnectionTable]
    probing: ClassVar[ConnectionTable]  # on the port for probes
    health_port: ClassVar[int | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading = _NOTHING
        self._chunk_bytes = 0  # the latest
        self._head_bytes = 0  # since the head began, without the chunk it began in
        self._ignored_bytes = 0
        self._trailers = self._trailer_bytes = 0
        self._head_is_known = False  # what the parser reads is a head once more
        self._between_bytes = 0  # since the last byte of the body
        self._table = self.everybody
        self._over_limit = False
        self._stopped_reading = False  # nothing more is read
        self._problem: ServeError | None = None  # set by a callback of the parser
        self._arriving: Exchange | None = None  # of the request that is read
        self._answering: RequestResponseCycle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # Connection

    # uvicorn narrows the type of asyncio's protocol as well.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.health_port is not None and self.server and self.server[1] == self.health_port:
            self._table = self.probing
        self._over_limit = not self._table.enter(self, self.client[0] if self.client else None)
        if self._over_limit and self._table.spare > _FOR_PROBES:
            self._refuse(Crowded("too many connections are open: try again in a moment"))
        else:
            self._await_bytes(self.settings.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.leave(self)
        self._stop_reading_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn keeps the timer after a reset
        # uvicorn reports a disconnect only to the last request of a pipeline.
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
            _exchange(self._answering).leave()
        # They refer back to the connection: without this only the garbage collector frees it.
        self.cycle = self.scope = None  # type: ignore[assignment]  # uvicorn's
        self._answering = self._arriving = None
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._stopped_reading:
            return
        self._unset_keepalive_if_required()
        self._chunk_bytes = len(data)
        if self._reading == _HEAD:
            self._head_bytes += self._chunk_bytes
        elif self._reading == _BODY:
            self._between_bytes += self._chunk_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._go_on_without_upgrade(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._problem or BadHttp("this is not a request of HTTP/1.1"))
            return
        if self._reading == _HEAD:
            problem = problem_of_head(self.settings, self.url, self.headers, self._head_bytes)
            if problem is not None:
                self._refuse(problem)
            elif self._read_timer is None:
                self._await_bytes(self.settings.header_timeout_s)
        elif self._reading == _BODY:
            # Trailers and chunk extensions, which the parser buffers until they are complete.
            problem = problem_of_trailers(self.settings, self._trailers, self._between_bytes)
            if problem is not None:
                self._refuse(problem)
        elif self._reading == _NOTHING and self._idle:
            self._await_next_request()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Ignore the offer of another protocol, as HTTP allows; the body and more may follow.

        The parser takes such a head for the whole request. A new one, which is told how long the
        body is, reads the rest.
        """
        of_body = (b"content-length", b"transfer-encoding")
        framing = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in of_body]
        version = self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self._head_is_known = True
        self.parser.feed_data(b"POST / HTTP/%b\r\n%b\r\n" % (version, b"".join(framing)))
        self._head_is_known = False
        if rest:
            self.data_received(rest)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """Whether to stay open for a client that sends no more.

        A client that disconnected looks the same, so requests that run a model are cancelled; cheap
        ones are answered.
        """
        unanswered = [self._answering, *(cycle for cycle, _ in self.pipeline)]
        stay = not self._idle and all(
            cycle is not None and cycle.scope["method"] in _LOOKING for cycle in unanswered
        )
        if stay:
            self._end_after_answer()
        return stay

    # Parser

    def on_url(self, url: bytes) -> None:
        if not self._head_is_known:
            super().on_url(url)

    def on_message_begin(self) -> None:
        if self._head_is_known:
            return
        super().on_message_begin()
        self._reading = _HEAD
        self._head_bytes = 0
        # Made now: the application starts later, after what the loop has already read.
        self._arriving = cast(dict[str, object], self.scope)[EXCHANGE_KEY] = Exchange(
            time.perf_counter(), self, self._over_limit, self._table is self.probing
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_known:
            return
        if self._reading != _BODY:
            super().on_header(name, value)
            return
        # A trailer, which is not passed on as a header.
        self._trailers += 1
        self._trailer_bytes += len(name) + len(value)
        self._problem = problem_of_trailers(self.settings, self._trailers, self._trailer_bytes)
        if self._problem is not None:
            raise self._problem

    def on_headers_complete(self) -> None:
        if self._head_is_known:
            return
        size = self._head_bytes + self._chunk_bytes
        # Perhaps: the chunk may hold other bytes too.
        if size > self.settings.max_header_bytes:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._problem = problem_of_head(self.settings, self.url, self.headers, size)
        if self._problem is None:
            self._problem = problem_of_headers(self.parser.get_http_version(), self.headers)
        if self._problem is None and self._too_far_ahead():
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

    def _too_far_ahead(self) -> bool:
        """Whether too many requests, or headers of them, would wait for answers to others."""
        if not self.pipeline:
            return False
        waiting = [cast(list[object], one.scope["headers"]) for one, _ in self.pipeline]
        headers = len(self.headers) + sum(map(len, waiting))
        return len(self.pipeline) >= _MAX_PIPELINED or headers > 2 * self.settings.max_headers

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._between_bytes = 0
        if self.cycle.response_complete:
            self._ignored_bytes += len(body)
            if self._ignored_bytes > self.settings.max_body_bytes:
                self._close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only the head is
        super().on_message_complete()
        if self._arriving is not None:
            self._arriving.has_body = True
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
        elif self._reading == _BODY:
            # Answered before its body arrived, so the body is not read.
            self._await_bytes(self.settings.body_timeout_s)
        elif self._reading == _NOTHING:
            # Many connections may wait for a next request: they keep nothing of the last one.
            self.cycle = self.scope = None  # type: ignore[assignment]  # uvicorn's
            self._answering = self._arriving = None
            self.headers = []

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = self._undivided(cycle, app)
        super()._start_asgi_task(cycle, app)

    def take_body(self) -> bytes | None:
        """A body that has arrived whole; None if the client has disconnected."""
        cycle = self._answering
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return None
        self.flow.resume_reading()
        cycle.message_event.clear()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    # Writing

    def write_whole(
        self, status: int, headers: Sequence[Header], always: HeaderList, body: bytes
    ) -> bool:
        """Write a whole answer, head and body in one call.

        uvicorn writes the two separately, which costs a system call and a packet, and checks every
        header that we made. False if this answer has to be written by uvicorn. `always` are the
        headers that every answer has.
        """
        cycle = self._answering
        if cycle is None or cycle.disconnected or cycle.response_started or self.flow.write_paused:
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
        """The application, for HTTP/1.0 clients: they know no chunks, which uvicorn always sends.

        The end of the connection ends the body instead.
        """
        cycle.chunked_encoding = False
        # Such a client sends its body without waiting, and would take `100 Continue` for the
        # answer.
        cycle.waiting_for_100_continue = False

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_undivided(message: Any) -> None:
                if message["type"] == "http.response.body":
                    # uvicorn counts down the bytes that are still to come.
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

    # Shutdown

    def unfinished(self, since_s: float) -> bool:
        """Whether a request that had begun to arrive at that time is still unanswered."""
        if self._table is self.probing:
            return False
        if self._reading == _HEAD and not self._stopped_reading:
            assert self._arriving is not None
            if self._arriving.arrived_s <= since_s:
                return True
        if not self._idle and self._answering is not None:  # those behind it arrived later
            return _exchange(self._answering).arrived_s <= since_s
        return self.transport.get_write_buffer_size() > 0

    def end(self, problem: ServeError) -> None:
        """Answer unanswered requests with this error, and cut off half-written answers."""
        cycle = self._answering
        if self.transport.is_closing():
            return
        if cycle is None or self._idle:
            if self._reading == _HEAD:
                self._refuse(problem)
            return
        exchange = _exchange(cycle)
        exchange.ended = True  # before the application starts
        exchange.fail(problem)
        if not cycle.response_started:
            request_id = exchange.id or request_id_of(dict(cycle.scope["headers"]))
            self._write_refusal(problem, cycle.scope["path"], request_id)
        cycle.disconnected = True
        cycle.message_event.set()
        self._close()

    # Making room

    def may_go(self) -> bool:
        return self.transport.get_write_buffer_size() == 0 and not self._unread()

    def _unread(self) -> bool:
        """Whether bytes have come that were not read yet: of a next request, perhaps."""
        opened = self.transport.get_extra_info("socket")
        if opened is None or opened.fileno() < 0:
            return False
        return any(fcntl.ioctl(opened.fileno(), termios.FIONREAD, bytes(4)))

    def make_room(self) -> None:
        self.count_eviction()
        if self._reading == _HEAD and self._idle:
            self._refuse(Crowded("too many connections are open: try again in a moment"))
        else:
            self._close()

    # Errors and the end

    @property
    def _idle(self) -> bool:
        """Whether every request is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, problem: ServeError) -> None:
        """Answer with this error, after the answers to earlier requests, and close."""
        behind = self._reading == _BODY and self._answering is not self.cycle
        if behind:  # of a request that waits for its turn, which never comes
            assert self._answering is not None
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        if behind or (not self._idle and self._reading != _BODY):
            self.count_refusal(problem.code)
            self._end_after_answer()
            return
        # The error may be in a body: nothing may be written into an answer that has begun.
        cycle = self._answering if self._reading == _BODY else None
        if cycle is None or cycle.response_started:
            self.count_refusal(problem.code)
        else:
            _exchange(cycle).fail(problem)
        if cycle is None or not cycle.response_started:
            path = self.url.partition(b"?")[0].decode("latin-1") if self.scope else ""
            known = "" if cycle is None else _exchange(cycle).id
            request_id = known or request_id_of(dict(self.headers) if self.scope else {})
            self._write_refusal(problem, path, request_id)
            if cycle is None and self.settings.access_log:  # the middleware notes all others
                note_refusal(problem, path, request_id)
        self._close()

    def _write_refusal(self, problem: ServeError, path: str, request_id: str) -> None:
        """A whole error response, for clients that never reach the application."""
        body = json.dumps(error_body(problem, path)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            *SECURITY_HEADERS,
        ]
        headers += [
            (name.encode(), value.encode())
            for name, value in problem.headers().items()
            if name != "connection"
        ]
        self.transport.write(
            b"".join((STATUS_LINE[problem.status], _lines(headers), b"\r\n", body))
        )

    def _end_after_answer(self) -> None:
        self._stopped_reading = True
        if self._idle:
            self._close()
        else:
            self.cycle.keep_alive = False

    def _close(self) -> None:
        self._stopped_reading = True
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
        if self._reading == _HEAD:
            limit_s = self.settings.header_timeout_s
            self._refuse(RequestTimeout(f"the headers did not arrive within {limit_s:g} s"))
        else:
            self._close()

    def _await_next_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _await_reader(self, always: bool = False) -> None:
        """Close the connection if the client does not read what was sent."""
        if self._send_timer is None and (always or self.transport.get_write_buffer_size()):
            self._send_timer = self.loop.call_later(self.settings.send_timeout_s, self._cut)

    def _cut(self) -> None:
        if self not in self.connections:  # the client has gone
            return
        # Otherwise the system would keep the unsent bytes in memory.
        own: socket.socket = self.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def _exchange(cycle: RequestResponseCycle) -> Exchange:
    exchange: Exchange = cast(dict[str, Any], cycle.scope)[EXCHANGE_KEY]
    return exchange


def limited(
    settings: Settings,
    connections: int,
    count_refusal: Callable[[str], None],
    count_eviction: Callable[[], None] = lambda: None,
) -> type[LimitedProtocol]:
    """The protocol class that uvicorn makes for each client, of so many at most."""
    of_address = settings.max_address_connections or max(1, connections // 2)
    proxies = tuple(map(ipaddress.ip_network, settings.trusted_proxies))
    shared = {
        "settings": settings,
        "count_refusal": staticmethod(count_refusal),
        "count_eviction": staticmethod(count_eviction),
        "everybody": ConnectionTable(connections, of_address, proxies),
        "probing": ConnectionTable(_PROBING, _PROBING, ()),
    }
    return type("Connection", (LimitedProtocol,), shared)


def _lines(headers: Sequence[Header]) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") + lines.count(b"\r") > 2 * len(headers):
        raise RuntimeError("a header holds the end of a line")
    return lines


_same_lines = lru_cache(maxsize=8)(_lines)
