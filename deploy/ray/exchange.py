"""A request and its answer as they pass between two processes, and an ASGI application run on them.

Plain data, since Ray pickles it. Knows ASGI; deliberately neither Ray nor what is asked.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from serve.wire.body import WHOLE_BODY_KEY
from serve.wire.departure import DEPARTURE_KEY, Departure
from serve.wire.envelope import ARRIVED_KEY, WHOLE_KEY
from serve.wire.origin import Header, HeaderList

MODEL_KEY = "stepdial.model"  # the model that the request was sent here for
SIGNATURE = b"x-stepdial-replica"  # the header that names the replica
_LEAVE_S = 10.0

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A whole request."""

    method: str
    scheme: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes
    model: str | None = None  # that it is for
    age_s: float = 0.0  # how long ago it arrived

    def scope(self) -> dict[str, Any]:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            MODEL_KEY: self.model,
            ARRIVED_KEY: time.perf_counter() - self.age_s,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Headers

    @property
    def streams(self) -> bool:
        """Whether events follow, each of use by itself."""
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the body; `over` is the last."""

    body: bytes
    over: bool


Part = Head | Piece


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer with its body."""

    head: Head
    body: bytes


async def exchanged(app: ASGIApp, asked: Asked) -> AsyncGenerator[list[Part], None]:
    """The answer in pieces as they come; those that come together are together.

    Whoever stops before the end has left: the application is told, and waited for.
    """
    exchange = _Exchange(app, asked)
    try:
        while True:
            together = await exchange.take()
            if not together:
                return
            yield together
            last = together[-1]
            if isinstance(last, Piece) and last.over:
                return
    finally:
        await exchange.end()


async def whole_of(app: ASGIApp, asked: Asked) -> Whole:
    """The answer once it is there. Whoever is cancelled meanwhile has left, as above."""
    exchange = _Exchange(app, asked)
    try:
        head, *pieces = await exchange.all()
    finally:
        await exchange.end()
    assert isinstance(head, Head), "an answer without a head"
    return Whole(head, b"".join(piece.body for piece in pieces if isinstance(piece, Piece)))


class _Exchange:
    """An application that runs, and what it has said."""

    def __init__(self, app: ASGIApp, asked: Asked) -> None:
        self._parts: list[Part] = []
        self._came, self._gone = asyncio.Event(), asyncio.Event()
        self._departure = Departure()
        self._body: bytes | None = asked.body
        scope = asked.scope() | {
            DEPARTURE_KEY: self._departure,
            WHOLE_BODY_KEY: lambda: asked.body,
            WHOLE_KEY: self._send_whole,
        }
        self._running = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._running.add_done_callback(lambda _: self._came.set())

    async def take(self) -> list[Part]:
        """What has come since, at least one part; none once all has been taken."""
        while not self._parts and not self._running.done():
            self._came.clear()
            await self._came.wait()
        if not self._parts:
            self._running.result()
        together, self._parts = self._parts, []
        return together

    async def all(self) -> list[Part]:
        await asyncio.shield(self._running)
        return self._parts

    async def end(self) -> None:
        """Nobody listens any more."""
        if not self._running.done():
            self._gone.set()
            self._departure.happen()
            await asyncio.wait([self._running], timeout=_LEAVE_S)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._say(_part(message))

    def _send_whole(
        self, status: int, headers: Sequence[Header], always: HeaderList, body: bytes
    ) -> bool:
        self._say(Head(status, (*headers, *always)), Piece(body, True))
        return True

    def _say(self, *parts: Part) -> None:
        self._parts += parts
        self._came.set()


def _part(message: Message) -> Part:
    if message["type"] == "http.response.start":
        headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
        return Head(message["status"], headers)
    return Piece(bytes(message.get("body", b"")), not message.get("more_body", False))
