"""A request and its answer as they pass between two processes, and an ASGI application run on them.

Plain data, since Ray pickles it. Knows ASGI; deliberately neither Ray nor what is asked.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from serve.wire.envelope import ARRIVED_KEY

MODEL_KEY = "stepdial.model"  # the model that the request was sent here for
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


async def exchanged(app: ASGIApp, asked: Asked) -> AsyncGenerator[list[Part], None]:
    """The answer in pieces as they come; those that come together are together.

    Whoever stops before the end has left: the application is told, and waited for.
    """
    parts: list[Part] = []
    came, gone = asyncio.Event(), asyncio.Event()
    read = False

    async def receive() -> Message:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": asked.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        parts.append(_part(message))
        came.set()

    scope: Scope = asked.scope()
    running = asyncio.ensure_future(app(scope, receive, send))
    running.add_done_callback(lambda _: came.set())
    try:
        while True:
            await came.wait()
            came.clear()
            if parts:
                together, parts = parts, []
                yield together
                last = together[-1]
                if isinstance(last, Piece) and last.over:
                    return
            elif running.done():
                running.result()
                return
    finally:
        gone.set()
        await asyncio.wait([running], timeout=_LEAVE_S)


def _part(message: Message) -> Part:
    if message["type"] == "http.response.start":
        headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
        return Head(message["status"], headers)
    return Piece(bytes(message.get("body", b"")), not message.get("more_body", False))
