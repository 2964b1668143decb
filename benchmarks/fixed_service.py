"""A queue before one server of known speed, behind HTTP, for `benchmarks.queueing`.

It takes requests in order and answers each when the one server in it would have been done, with
no work of its own, so that its times are exact however many wait. Services are all as long, or of
random length by a seed. It runs as a process of its own.
"""

import argparse
import asyncio
import json
import random
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.lab import ROOT

MODEL = "stub"
_END = b"\r\n\r\n"


def _response(answer: dict[str, object]) -> bytes:
    body = json.dumps(answer).encode()
    # Kept alive also for clients of HTTP/1.0, which must be told.
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\nConnection: keep-alive\r\n\r\n" + body


_MODELS = _response({"data": [{"id": MODEL, "task": "classify", "labels": ["yes", "no"]}]})
_LADDER = _response({"rungs": [{"steps": 1}]})
_ANSWER = _response({"results": [{"label": "yes", "budget": {"steps": 1, "reason": "exact"}}]})


@dataclass(frozen=True, slots=True)
class FixedService:
    """A queue that runs."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def running_queue(service_s: float, scattered: bool = False) -> Iterator[FixedService]:
    """A queue on a free port; `scattered` services are exponential with that mean."""
    command = [sys.executable, "-m", "benchmarks.fixed_service", str(service_s)]
    command += ["--scattered"] if scattered else []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "it was asked for"
            yield FixedService("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.terminate()


class _Queue:
    """When the one server will be done with what has come."""

    def __init__(self, service_s: float, scattered: bool) -> None:
        self._service_s, self._draw = service_s, random.Random(0) if scattered else None
        self._free_s = 0.0

    def enter(self, now_s: float) -> float:
        """The moment at which the request that comes now will have been served."""
        length_s = self._draw.expovariate(1 / self._service_s) if self._draw else self._service_s
        self._free_s = max(self._free_s, now_s) + length_s
        return self._free_s


class _Connection(asyncio.Protocol):
    """Answers one request after another."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(_END)
        if not end:
            return
        lines = head.lower().split(b"\r\n")
        lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        if len(rest) < sum(lengths):
            return
        self._received = rest[sum(lengths) :]
        if lines[0].startswith(b"post"):
            loop = asyncio.get_running_loop()
            loop.call_at(self._queue.enter(loop.time()), self._transport.write, _ANSWER)
        else:
            self._transport.write(_LADDER if b"/ladder" in lines[0] else _MODELS)


async def _serve(queue: _Queue) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(queue), "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("service_s", type=float, help="seconds of one service, or their mean")
    parser.add_argument("--scattered", action="store_true", help="services of random length")
    parsed = parser.parse_args(arguments)
    # select() takes microseconds; the usual selector would round every answer up to one ms.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(_serve(_Queue(parsed.service_s, parsed.scattered)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
