"""Server-sent events: an answer token by token, and exactly one terminal event.

Knows how events are written and sent; deliberately not how they come to be.
"""

import json
from collections.abc import Callable
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.engine.events import Event, FailedEvent, GeneratedEvent, TokenEvent
from serve.errors import InternalError
from serve.wire.answers import Answer
from serve.wire.mailbox import ClientGone, Mailbox

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends what comes into a mailbox, until the terminal event or until the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[Event],
        mailbox: Mailbox,
        work: AsyncExitStack,
        chunk: Callable[[TokenEvent], Answer],
        done: Callable[[GeneratedEvent], Answer],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self._first = first
        self._mailbox = mailbox
        self._work = work
        self._chunk = chunk
        self._done = done

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
                    # Tokens that came together go out together.
                    body = b"".join(map(self._write, events))
                    over = not isinstance(events[-1], TokenEvent)
                    await send({"type": "http.response.body", "body": body, "more_body": not over})
                    if over:
                        return
                    events = await self._mailbox.take()
            except ClientGone:
                return

    def _write(self, event: Event) -> bytes:
        match event:
            case TokenEvent():
                return b"data: " + _json(self._chunk(event)) + b"\n\n"
            case GeneratedEvent():
                return b"event: done\ndata: " + _json(self._done(event)) + b"\n\n"
            case FailedEvent():
                body = event.error.body()
            case _:
                body = InternalError("an event that no generation has").body()
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"


def _json(answer: Answer) -> bytes:
    # Escaped like the rest of JSON, a text can hold no line break that would end the event.
    return answer.model_dump_json(exclude_none=True).encode()
