"""Clients over HTTP, each of which asks again as soon as it has its answer.

One thread, one event loop, connections that are kept open, so that asking takes as little of the
machine as can be. It knows HTTP only as far as needed, and nothing of what the answers say.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.server import Server

_HEAD, _LENGTH = b"\r\n\r\n", b"content-length: "


@dataclass(frozen=True, slots=True)
class Load:
    """What came of it, in the time that was counted."""

    answers: int
    errors: int
    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def per_s(self) -> float:
        return self.answers / self.seconds


class _Client(asyncio.Protocol):
    def __init__(self, requests: Iterator[bytes], kept: "_Kept") -> None:
        self._requests = requests
        self._kept = kept
        self._received = b""
        self._sent_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_HEAD)
        if end < 0:
            return
        head = self._received[:end].lower()
        at = head.index(_LENGTH) + len(_LENGTH)
        if len(self._received) < end + len(_HEAD) + int(head[at:].split(b"\r\n", 1)[0]):
            return
        self._received = b""
        self._kept.note(int(head[9:12]), time.perf_counter() - self._sent_s)
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        self._kept.lost += 1

    def _ask(self) -> None:
        assert self._transport is not None
        self._sent_s = time.perf_counter()
        self._transport.write(next(self._requests))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class _Kept:
    def __init__(self) -> None:
        self.counts = False
        self.lost = self.errors = 0
        self.latencies_s: list[float] = []

    def note(self, status: int, latency_s: float) -> None:
        if not self.counts:
            return
        if status == 200:
            self.latencies_s.append(latency_s)
        else:
            self.errors += 1


def load(server: Server, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> Load:
    """So many clients for so long, after a tenth of that which is not counted."""
    return asyncio.run(_load(server, path, bodies, clients, seconds))


async def _load(
    server: Server, path: str, bodies: Sequence[bytes], clients: int, seconds: float
) -> Load:
    requests = itertools.cycle([_request(server, path, body) for body in bodies])
    kept = _Kept()
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(clients):
        _, client = await loop.create_connection(
            lambda: _Client(requests, kept), server.host, server.port
        )
        made.append(client)
    await asyncio.sleep(seconds / 10)
    kept.counts = True
    begun_s = time.perf_counter()
    await asyncio.sleep(seconds)
    kept.counts = False
    taken_s = time.perf_counter() - begun_s
    lost = kept.lost
    for client in made:
        client.close()
    await asyncio.sleep(0)
    return Load(len(kept.latencies_s), kept.errors + lost, taken_s, tuple(kept.latencies_s))


def _request(server: Server, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
