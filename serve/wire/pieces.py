"""Large answers: JSON that is written piece by piece beside the event loop, and sent meanwhile.

Whatever an answer holds, no more of its JSON than a piece is in memory.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import final

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.wire.departure import DEPARTURE_KEY, Departure
from serve.wire.ready import ReadyAnswer

# Of a list that is written item by item: up to so many the loop writes an answer at once, which
# takes it a few milliseconds at most.
FEW_ENTRIES = 2048
_SLICE = 64  # items that are written together
PIECE_BYTES = 2**16


@final
class Each:
    """A list in an answer, whose items are made when they are written."""

    def __init__(self, items: Iterable[object]) -> None:
        self._items = items

    def written(self) -> Iterator[bytes]:
        items, first = iter(self._items), True
        yield b"["
        while some := [*islice(items, _SLICE)]:
            text = to_json(some)[1:-1]
            yield text if first else b"," + text
            first = False
        yield b"]"


def written(value: object) -> Iterator[bytes]:
    """The JSON of this, in parts of any size."""
    if isinstance(value, Each):
        yield from value.written()
    elif isinstance(value, Mapping):
        before = b"{"
        for key, member in value.items():
            yield before + to_json(key) + b":"
            yield from written(member)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        before = b"["
        for item in value:
            yield before
            yield from written(item)
            before = b","
        yield b"]" if value else b"[]"
    else:
        yield to_json(value)


def answer_of(body: Mapping[str, object], entries: int, *headers: tuple[bytes, bytes]) -> Response:
    """A 200 with this body, in which lists are Each of so many entries together."""
    if entries <= FEW_ENTRIES:
        return ReadyAnswer(b"".join(written(body)), *headers)
    return PiecewiseAnswer(body, *headers)


@final
class PiecewiseAnswer(Response):
    """A 200 whose JSON is written on another thread while it is sent."""

    def __init__(self, body: Mapping[str, object], *headers: tuple[bytes, bytes]) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self.raw_headers += headers
        self._parts = written(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure: Departure | None = scope.get(DEPARTURE_KEY)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # Whoever has left gets nothing more written.
        while departure is None or not departure.gone:
            piece = await asyncio.to_thread(self._piece)
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})
            if not piece:
                return

    def _piece(self) -> bytes:
        """What comes next; nothing at the end."""
        parts: list[bytes] = []
        size = 0
        for part in self._parts:
            parts.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                break
        return b"".join(parts)
