"""Server-sent events: an answer in pieces, and exactly one terminal event.

Knows how events are written and sent; deliberately not how they come to be.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Generic

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.engine.job import Event, FailedEvent, GeneratedEvent, TokenEvent
from serve.errors import InternalError
from serve.wire.answers import Answer
from serve.wire.mailbox import ClientGone, EventT, Mailbox

# Each takes up to 0.2 ms to write, with the most logprobs.
_EVENTS = 64
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Written:
    """What events become on the wire, and whether the last of them ends the stream."""

    body: bytes
    over: bool


class EventStream(Response, Generic[EventT]):
    """Sends what comes into a mailbox, until the terminal event or until the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Sequence[EventT],
        mailbox: Mailbox[EventT],
        work: AsyncExitStack,
        write: Callable[[Sequence[EventT]], Written],
        headers: dict[str, str],
    ) -> None:
        """`work` ends with the stream; `first` has come already."""
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self._first = first
        self._mailbox = mailbox
        self._work = work
        self._write_events = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._work:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            events = self._first
            try:
                while True:
                    # Tokens that came together go out together; of those that came while nobody
                    # read, only so many that others get their turn.
                    written = self._write_events(events[:_EVENTS])
                    await send(
                        {
                            "type": "http.response.body",
                            "body": written.body,
                            "more_body": not written.over,
                        }
                    )
                    if written.over:
                        return
                    events = events[_EVENTS:]
                    if events:
                        await asyncio.sleep(0)
                    else:
                        events = await self._mailbox.take()
            except ClientGone:
                return


@dataclass(frozen=True, slots=True)
class NamedEvents:
    """Writes tokens as events without a name, and the end as `done` or `error`."""

    chunk: Callable[[TokenEvent], Answer]
    done: Callable[[GeneratedEvent], Answer]

    def write(self, events: Sequence[Event]) -> Written:
        over = not isinstance(events[-1], TokenEvent)
        return Written(b"".join(map(self._one, events)), over)

    def _one(self, event: Event) -> bytes:
        match event:
            case TokenEvent():
                return event_of(self.chunk(event).model_dump_json(exclude_none=True))
            case GeneratedEvent():
                done = self.done(event).model_dump_json(exclude_none=True)
                return b"event: done\n" + event_of(done)
            case FailedEvent():
                body = event.error.body()
            case _:
                body = InternalError("an event that no generation has").body()
        return b"event: error\n" + event_of(json.dumps(body))


def event_of(data: str) -> bytes:
    """An event with this JSON: in it, a text can hold no line break that would end the event."""
    return b"data: " + data.encode() + b"\n\n"
