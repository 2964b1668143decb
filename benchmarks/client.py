"""The load generator of all benchmarks.

`Client` is one connection that waits for its answers and can read them token by token. `Crowd` has
many of those, a thread each, for answers that are checked. `load` is a closed loop and `fire` an
open one, in one event loop, for what is timed: they take as little time of their own as Python can.
"""

import asyncio
import gc
import http.client
import itertools
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from benchmarks.server import Server

TIMEOUT_S = 120.0


class UnexpectedAnswer(Exception):
    """The server answered, but not with what was asked for."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, and the time from asking to having read it."""

    body: dict[str, Any]
    wall_ms: float


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event, and when it came after the request was sent."""

    name: str  # empty for a token
    data: dict[str, Any]
    at_ms: float


class Client:
    """One connection to a server. Not for several threads."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    @classmethod
    def of(cls, server: Server) -> Self:
        return cls(server.host, server.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, whatever is under way; the next request connects again."""
        self._connection.close()

    def get(self, path: str) -> str:
        """The text at a path."""
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise UnexpectedAnswer(f"{response.status} from {path}: {text[:300]}")
        return text

    def status(self, path: str) -> int:
        """The status at a path, whatever it is."""
        try:
            self._connection.request("GET", path)
            response = self._connection.getresponse()
            response.read()
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise ConnectionError(f"{path}: {error}") from error
        return response.status

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """The answer to a JSON body; UnexpectedAnswer unless it is a 200."""
        payload = json.dumps(body).encode()
        begun_s = time.perf_counter()
        self._send(path, payload)
        response = self._connection.getresponse()
        answer = response.read()
        wall_ms = (time.perf_counter() - begun_s) * 1000
        _check(response, path, answer)
        return Reply(json.loads(answer), wall_ms)

    def send_only(self, path: str, body: dict[str, Any]) -> None:
        """Ask, without waiting for the answer; `close` then leaves the server with it."""
        self._send(path, json.dumps(body).encode())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[StreamEvent]:
        """The events of an answer as they come; whoever stops before the end must `close`."""
        payload = json.dumps(body).encode()
        begun_s = time.perf_counter()
        self._send(path, payload)
        response = self._connection.getresponse()
        if response.status != 200:
            _check(response, path, response.read())
        name = ""
        # `read1` takes what has come: reading by lines would wait for, and count, more of them.
        pending = b""
        while True:
            piece = response.read1()
            if not piece:
                break
            at_ms = (time.perf_counter() - begun_s) * 1000
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                name, data = _parse(event)
                yield StreamEvent(name, data, at_ms)
        if pending or not name:
            raise UnexpectedAnswer(f"the stream of {path} broke off after {pending[-100:]!r}")

    def _send(self, path: str, payload: bytes) -> None:
        self._connection.request("POST", path, payload, {"content-type": "application/json"})


def _parse(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = "", b""
    for line in event.split(b"\n"):
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data = value
    return name, json.loads(data)


def _check(response: http.client.HTTPResponse, path: str, answer: bytes) -> None:
    if response.status != 200:
        raise UnexpectedAnswer(f"{response.status} from {path}: {answer[:300]!r}")


def arrivals(per_s: float, seconds: float, draw: random.Random) -> Iterator[float]:
    """When requests are due that come by chance, as of people who do not know of each other."""
    due_s = draw.expovariate(per_s)
    while due_s < seconds:
        yield due_s
        due_s += draw.expovariate(per_s)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of a crowd that went well."""

    what: str  # as its client calls it
    due_s: float  # after the start
    latency_s: float  # from when it was due


class Crowd:
    """Clients that ask and check, each over its own connection in a thread of its own.

    A client calls its function for one request after the other, until the crowd is told to stop:
    `once`, for so many `seconds`, or `until_error`. With `due` the requests of all are due at those
    moments, and it ends with the last. What a function raises is kept, and its client connects
    anew.
    """

    def __init__(
        self,
        server: Server,
        asks: Sequence[Callable[[Client], str]],
        *,
        due: Iterable[float] | None = None,
        seconds: float = math.inf,
        once: bool = False,
        until_error: bool = False,
    ) -> None:
        self.answered: list[Answered] = []
        self.errors: list[Exception] = []
        self.begun_s = time.perf_counter()
        self._server, self._seconds = server, seconds
        self._once, self._until_error = once, until_error
        self._due, self._turn = None if due is None else iter(due), threading.Lock()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._go_on, args=(ask,), daemon=True) for ask in asks
        ]

    def __enter__(self) -> Self:
        self.begun_s = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Wait for the answers that are under way; after an error nothing more is asked."""
        if error is not None:
            self.stop()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    @property
    def asking(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    @property
    def kinds(self) -> Counter[str]:
        """How many requests went well, by what their clients call them."""
        return Counter(one.what for one in self.answered)

    def stop(self) -> None:
        """Let nobody ask any more."""
        self._over.set()

    def _go_on(self, ask: Callable[[Client], str]) -> None:
        with Client.of(self._server) as client:
            while not self._over.is_set() and (due_s := self._next_s()) is not None:
                time.sleep(max(0.0, due_s - self._now_s()))
                try:
                    what = ask(client)
                except Exception as error:
                    self.errors.append(error)
                    client.close()
                    if self._until_error:
                        break
                else:
                    self.answered.append(Answered(what, due_s, self._now_s() - due_s))
                if self._once:
                    break

    def _next_s(self) -> float | None:
        """The next moment that no other client has taken; None if there is none left."""
        if self._due is None:
            now_s = self._now_s()
            return now_s if now_s < self._seconds else None
        with self._turn:
            return next(self._due, None)

    def _now_s(self) -> float:
        return time.perf_counter() - self.begun_s


_HEAD, _LENGTH = b"\r\n\r\n", b"content-length: "


class _Connection(asyncio.Protocol):
    """Sends one request at a time, and tells its owner of the answer or that it was lost."""

    def __init__(self, owner: "_Owner") -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._received = b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_HEAD)
        if end < 0:
            return
        head = self._received[:end].lower()
        at = head.index(_LENGTH) + len(_LENGTH)
        length = int(head[at:].split(b"\r\n", 1)[0])
        if len(self._received) >= end + len(_HEAD) + length:
            self._owner.answered(self, head, self._received[end + len(_HEAD) :])

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.connection_lost(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Owner(Protocol):
    """What sends over connections."""

    def answered(self, connection: _Connection, head: bytes, body: bytes) -> None: ...

    def connection_lost(self, connection: _Connection) -> None: ...


async def _connect(server: Server, owner: _Owner) -> _Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: _Connection(owner), server.host, server.port
    )
    return connection


def post_of(server: Server, path: str, body: bytes) -> bytes:
    """A whole request, as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _status(head: bytes) -> int:
    return int(head[9:12])


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a closed loop, in the time that was counted."""

    answers: int
    errors: int
    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def per_s(self) -> float:
        return self.answers / self.seconds


class ClosedLoop:
    """Connections that each have one request under way, and ask again as soon as it is answered."""

    def __init__(self, server: Server, path: str, bodies: Sequence[bytes]) -> None:
        self.again = True  # whether who is answered asks again
        self.lost = 0  # connections, while they waited
        self._server = server
        self._requests = itertools.cycle([post_of(server, path, body) for body in bodies])
        self._waiting: dict[_Connection, float] = {}  # since when
        self._all: list[_Connection] = []
        self._changed = asyncio.Event()
        self.forget()

    def forget(self) -> None:
        """Count anew."""
        self.statuses = Counter[int]()
        self.latencies_s: list[float] = []  # of 200s

    async def begin(self, clients: int) -> None:
        """Connect all, then ask with all."""
        self._all = [await _connect(self._server, self) for _ in range(clients)]
        for connection in self._all:
            self._ask(connection)

    async def reached(self, answers: int) -> None:
        """Wait for so many answers, or until nobody waits for one."""
        while self.statuses.total() < answers and self._waiting:
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        """Leave, whatever is under way."""
        self._waiting.clear()
        for connection in self._all:
            connection.close()
        await asyncio.sleep(0)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def answered(self, connection: _Connection, head: bytes, body: bytes) -> None:
        since_s = self._waiting.pop(connection, None)
        if since_s is None:
            return
        status = _status(head)
        self.statuses[status] += 1
        if status == 200:
            self.latencies_s.append(time.perf_counter() - since_s)
        if self.again:
            self._ask(connection)
        self._changed.set()

    def connection_lost(self, connection: _Connection) -> None:
        if self._waiting.pop(connection, None) is not None:
            self.lost += 1
            self._changed.set()

    def _ask(self, connection: _Connection) -> None:
        self._waiting[connection] = time.perf_counter()
        connection.send(next(self._requests))


def load(server: Server, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> Load:
    """So many clients for so long, after a tenth of that which is not counted."""

    async def run() -> Load:
        loop = ClosedLoop(server, path, bodies)
        await loop.begin(clients)
        await asyncio.sleep(seconds / 10)
        loop.forget()
        begun_s = time.perf_counter()
        await asyncio.sleep(seconds)
        taken_s = time.perf_counter() - begun_s
        good, errors = loop.statuses[200], loop.statuses.total() - loop.statuses[200] + loop.lost
        latencies_s = tuple(loop.latencies_s)
        await loop.end()
        return Load(good, errors, taken_s, latencies_s)

    return asyncio.run(run())


@dataclass(slots=True)
class Shot:
    """One request of an open loop: when it is due, what it says, and what came of it."""

    due_s: float  # after the start
    body: dict[str, Any]
    sent_s: float = 0.0
    ended_s: float | None = None  # None: nothing came
    status: int = 0
    head: bytes = b""  # of the answer
    answer: bytes = b""

    @property
    def latency_s(self) -> float:
        """From when it was due, so that a slow server cannot slow its own load down."""
        return float("inf") if self.ended_s is None else self.ended_s - self.due_s

    @property
    def read(self) -> dict[str, Any]:
        """The answer as JSON."""
        found: dict[str, Any] = json.loads(self.answer)
        return found


class _OpenLoop:
    """Every request is sent when it is due, whatever became of those before."""

    def __init__(self, server: Server, path: str, shots: Sequence[Shot]) -> None:
        self._server = server
        self._waiting = [
            (shot, post_of(server, path, json.dumps(shot.body).encode()))
            for shot in sorted(shots, key=lambda shot: shot.due_s)
        ]
        self._left = len(self._waiting)
        self._free: list[_Connection] = []
        self._all: list[_Connection] = []
        self._sent: dict[_Connection, Shot] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._begun_s = 0.0

    async def run(self, connections: int, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            self._free.append(await self._connected())
        last_s = self._waiting[-1][0].due_s
        self._begun_s = time.perf_counter()
        begun = loop.time()
        for shot, request in self._waiting:
            loop.call_at(begun + shot.due_s, self._fire, shot, request)
        try:
            async with asyncio.timeout(last_s + patience_s):
                await self._done.wait()
        except TimeoutError:
            pass  # requests without an answer by now count as unanswered
        finally:
            for task in self._connecting:
                task.cancel()
            await asyncio.gather(*self._connecting, return_exceptions=True)
            self._sent.clear()
            for connection in self._all:
                connection.close()
            await asyncio.sleep(0.05)

    def answered(self, connection: _Connection, head: bytes, body: bytes) -> None:
        shot = self._sent.pop(connection, None)
        if shot is None:
            return
        shot.ended_s = self._now_s()
        shot.status, shot.head, shot.answer = _status(head), head, body
        self._free.append(connection)
        self._over()

    def connection_lost(self, connection: _Connection) -> None:
        if self._sent.pop(connection, None) is not None:
            self._over()
        elif connection in self._free:  # closed by the server, perhaps for being idle
            self._free.remove(connection)

    def _now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _over(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    def _fire(self, shot: Shot, request: bytes) -> None:
        if self._free:
            self._send(self._free.pop(), shot, request)
        else:
            task = asyncio.get_running_loop().create_task(self._fire_anew(shot, request))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _fire_anew(self, shot: Shot, request: bytes) -> None:
        try:
            connection = await self._connected()
        except OSError:
            self._over()
        else:
            self._send(connection, shot, request)

    def _send(self, connection: _Connection, shot: Shot, request: bytes) -> None:
        self._sent[connection] = shot
        shot.sent_s = self._now_s()
        connection.send(request)

    async def _connected(self) -> _Connection:
        connection = await _connect(self._server, self)
        self._all.append(connection)
        return connection


def burst(server: Server, path: str, bodies: Sequence[dict[str, Any]]) -> float:
    """Answers a second where all are asked for at once."""
    shots = [Shot(0.0, body) for body in bodies]
    begun_s = time.perf_counter()
    fire(server, path, shots, patience_s=60.0)
    return sum(shot.status == 200 for shot in shots) / (time.perf_counter() - begun_s)


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
        asyncio.run(_OpenLoop(server, path, shots).run(connections, patience_s))
    finally:
        gc.enable()
