"""Bytes of a client, as a connection reads them: heads, bodies, chunks, trailers, pipelines.

The first byte says in pieces of how many bytes they come and whether the loop turns in between. The
same bytes are then sent in one piece: what the application is asked must not depend on that.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn import Config
from uvicorn.server import ServerState

from serve.connection import LimitedProtocol, limited
from serve.exchange import EXCHANGE_KEY, Exchange
from serve.settings import Settings

HEADERS, HEADER_BYTES, BODY_BYTES = 12, 512, 2048
MOST_BYTES = 1 << 14
# A head of which one part comes later is measured with its separators, another without.
_OF_SIZE = {"headers_too_large", "url_too_long"}
_TURNS = 40
_HEAD = [(b"content-length", b"2")]
_STATUSES = {b"100", b"200", b"400", b"408", b"411", b"413", b"414", b"431", b"501", b"503"}


@dataclass(frozen=True)
class Asked:
    """What the application was told of one request."""

    method: str
    path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Wire(asyncio.Transport):
    """The other end: keeps what is written, and closes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = self.paused = False

    def write(self, data: Any) -> None:
        assert not self.closed, "written after the end"
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 4), "sockname": ("127.0.0.1", 8000)}.get(name, default)


class Application:
    """Reads every body and answers, in one piece or in two; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.raised: list[BaseException] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._answer(scope, receive, send)
        except Exception as error:  # of which uvicorn would make a 500
            self.raised.append(error)
            raise

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        exchange: Exchange = scope[EXCHANGE_KEY]
        assert exchange.connection is not None
        if exchange.has_body:
            body = exchange.connection.take_body()
        else:
            body = await self._read(receive)
        if body is None or len(body) > BODY_BYTES:  # or its client has left
            await self._say(send, 413)
            return
        # After the body: what came behind it may not have changed what the head said.
        headers = tuple(scope["headers"])
        assert len(headers) <= HEADERS, "more headers than are allowed"
        assert sum(len(name) + len(value) for name, value in headers) <= HEADER_BYTES
        self.asked.append(
            Asked(scope["method"], scope["raw_path"], scope["query_string"], headers, body)
        )
        whole = scope["path"].startswith("/w")
        if not (whole and exchange.connection.write_whole(200, _HEAD, (), b"{}")):
            await self._say(send, 200)

    async def _say(self, send: Any, status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": _HEAD})
        await send({"type": "http.response.body", "body": b"{}"})

    async def _read(self, receive: Any) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > BODY_BYTES:
                return None
            if not message.get("more_body", False):
                return bytes(body)


_SETTINGS = Settings().model_copy(
    update={
        "max_headers": HEADERS,
        "max_header_bytes": HEADER_BYTES,
        "max_body_bytes": BODY_BYTES,
    }
)
_application = Application()
_config = Config(_application, log_config=None, access_log=False, ws="none", lifespan="off")
_loop = asyncio.new_event_loop()
_problems: list[dict[str, Any]] = []
_loop.set_exception_handler(lambda loop, context: _problems.append(context))


def one(data: bytes) -> None:
    """Read these bytes; AssertionError, or whatever else is thrown, where a rule is broken."""
    if not 1 < len(data) <= MOST_BYTES:
        return
    manner, sent = data[0], data[1:]
    pieces, refused = _loop.run_until_complete(_send(sent, (manner >> 1) + 1, bool(manner & 1)))
    whole, also_refused = _loop.run_until_complete(_send(sent, len(sent), False))
    if not _OF_SIZE & {*refused, *also_refused}:
        shared = min(len(pieces), len(whole))
        assert pieces[:shared] == whole[:shared], (pieces, whole)


async def _send(sent: bytes, size: int, turning: bool) -> tuple[list[Asked], list[str]]:
    refused: list[str] = []
    _problems.clear()
    _application.asked, _application.raised = [], []
    wire, connection = Wire(), _connect(refused)
    connection.connection_made(wire)
    for at in range(0, len(sent), size):
        if wire.paused or turning:
            await _turn(connection)
        if wire.closed or wire.paused:  # a client that waits for an answer
            break
        connection.data_received(sent[at : at + size])
        waiting = {connection._answering, *(cycle for cycle, _ in connection.pipeline)}
        held = sum(len(cycle.body) for cycle in waiting if cycle is not None)
        assert held <= len(sent), "more is kept than came"
    await _turn(connection)
    if not wire.closed:
        connection.eof_received()
        await _turn(connection)
    connection.connection_lost(None)
    await _turn(connection)
    assert not connection.server_state.tasks, "a request is left that nobody waits for"
    if _application.raised:
        raise _application.raised[0]
    assert not _problems, _problems
    assert connection not in connection.connections
    for answer in bytes(wire.written).split(b"HTTP/1.1 ")[1:]:
        assert answer[:3] in _STATUSES, answer[:80]
    assert not wire.written or wire.written.startswith(b"HTTP/1.1 ")
    for timer in (connection.timeout_keep_alive_task, connection._read_timer):
        assert timer is None or timer.cancelled(), "a timer is left"
    return _application.asked, refused


def _connect(refused: list[str]) -> LimitedProtocol:
    return limited(_SETTINGS, 8, refused.append)(_config, ServerState(), {}, _loop)


async def _turn(connection: LimitedProtocol) -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
        if not connection.server_state.tasks:
            return
