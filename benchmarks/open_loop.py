"""A client that sends each request when it is due, whatever became of those before.

Latency counts from when a request was due, so that a slow server cannot slow its own load down.
One thread, one event loop, connections that are kept open; it knows HTTP only as far as needed.
"""

import asyncio
import gc
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.server import Server

_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length: "


@dataclass(slots=True)
class Shot:
    """One request: when it is due after the start, what it says, and what came of it."""

    due_s: float
    body: dict[str, Any]
    sent_s: float = 0.0
    ended_s: float | None = None  # None: nothing came
    status: int = 0
    head: bytes = b""  # of the answer
    answer: bytes = b""

    @property
    def latency_s(self) -> float:
        """From when it was due."""
        return float("inf") if self.ended_s is None else self.ended_s - self.due_s

    @property
    def read(self) -> dict[str, Any]:
        """The answer as JSON."""
        found: dict[str, Any] = json.loads(self.answer)
        return found


class _Connection(asyncio.Protocol):
    """Sends one request at a time."""

    def __init__(self, volley: "_Volley") -> None:
        self._volley = volley
        self._transport: asyncio.Transport | None = None
        self._shot: Shot | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, shot: Shot, payload: bytes) -> None:
        assert self._transport is not None
        self._shot, self._received = shot, b""
        shot.sent_s = self._volley.now_s
        self._transport.write(payload)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_HEAD)
        if end < 0 or self._shot is None:
            return
        head = self._received[:end].lower()
        at = head.index(_LENGTH) + len(_LENGTH)
        length = int(head[at:].split(b"\r\n", 1)[0])
        if len(self._received) < end + len(_HEAD) + length:
            return
        shot, self._shot = self._shot, None
        shot.ended_s = self._volley.now_s
        shot.status, shot.head = int(head[9:12]), head
        shot.answer = self._received[end + len(_HEAD) :]
        self._volley.over(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._shot is not None:
            self._shot = None
            self._volley.lost()
        self._volley.forget(self)

    def close(self) -> None:
        self._shot = None
        if self._transport is not None:
            self._transport.abort()


class _Volley:
    """All requests of one run."""

    def __init__(self, server: Server, path: str, shots: Sequence[Shot]) -> None:
        self._server = server
        self._waiting = deque(
            (shot, _payload(server, path, shot.body))
            for shot in sorted(shots, key=lambda shot: shot.due_s)
        )
        self._left = len(self._waiting)
        self._free: list[_Connection] = []
        self._all: list[_Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._begun_s = 0.0

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    async def run(self, connections: int, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            self._free.append(await self._connect())
        last_s = self._waiting[-1][0].due_s
        self._begun_s = time.perf_counter()
        begun = loop.time()
        for shot, payload in self._waiting:
            loop.call_at(begun + shot.due_s, self._fire, shot, payload)
        try:
            async with asyncio.timeout(last_s + patience_s):
                await self._done.wait()
        except TimeoutError:
            pass  # whoever has no answer by now has given up
        finally:
            for task in self._connecting:
                task.cancel()
            await asyncio.gather(*self._connecting, return_exceptions=True)
            for connection in self._all:
                connection.close()
            await asyncio.sleep(0.05)

    def over(self, connection: _Connection) -> None:
        self._free.append(connection)
        self.lost()

    def forget(self, connection: _Connection) -> None:
        """The server has closed it, perhaps since nothing came on it for so long."""
        if connection in self._free:
            self._free.remove(connection)

    def lost(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    def _fire(self, shot: Shot, payload: bytes) -> None:
        if self._free:
            self._free.pop().send(shot, payload)
        else:
            task = asyncio.get_running_loop().create_task(self._fire_anew(shot, payload))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _fire_anew(self, shot: Shot, payload: bytes) -> None:
        try:
            connection = await self._connect()
        except OSError:
            self.lost()
        else:
            connection.send(shot, payload)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self), self._server.host, self._server.port
        )
        self._all.append(connection)
        return connection


def fire(
    server: Server, path: str, shots: Sequence[Shot], patience_s: float, connections: int = 64
) -> None:
    """Send all; wait until each has its answer, or so long after the last was due.

    Nothing is looked for that could be thrown away meanwhile: among tens of thousands of requests
    that takes tenths of a second, in which others become due and are then sent all at once.
    """
    gc.collect()
    gc.disable()
    try:
        asyncio.run(_Volley(server, path, shots).run(connections, patience_s))
    finally:
        gc.enable()


def _payload(server: Server, path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text
