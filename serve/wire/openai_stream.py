"""The stream of an answer in OpenAI's shape: chunks, then `[DONE]` or an error, once.

Knows the order of chunks; deliberately neither the shape of one nor how they are sent.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import final

from serve.engine.job import Event, FailedEvent, GeneratedEvent, TokenEvent
from serve.errors import InternalError, ServeError
from serve.wire.answers import Answer
from serve.wire.error_shapes import error_body
from serve.wire.openai_shapes import Head, Shape, Tail
from serve.wire.stream import Written, event_of

DONE = b"data: [DONE]\n\n"


@final
class ChunkWriter:
    """Writes what comes of the answers to one request, in the order in which it comes."""

    def __init__(
        self,
        shape: Shape,
        head: Head,
        answers: int,
        tail: Callable[[Sequence[GeneratedEvent]], Tail],
        path: str,
        counts: bool,
    ) -> None:
        """`tail` tells the end from those of all answers; `counts`: a last chunk has the usage."""
        self._shape = shape
        self._head = head
        self._answers = answers
        self._tail = tail
        self._path = path
        self._counts = counts
        self._opened: set[int] = set()
        self._ends: dict[int, GeneratedEvent] = {}

    def write(self, events: Sequence[tuple[int, Event]]) -> Written:
        """What these events become; nothing comes behind an error."""
        body = b""
        for index, event in events:
            match event:
                case TokenEvent():
                    body += self._open(index)
                    body += self._event(self._shape.piece(self._head, index, event))
                case GeneratedEvent():
                    body += self._open(index) + b"".join(self._end(index, event))
                case FailedEvent():
                    return Written(body + self._error(event.error), over=True)
                case _:
                    bug = InternalError("an event that no generation has")
                    return Written(body + self._error(bug), over=True)
        return Written(body, over=len(self._ends) == self._answers)

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        opening = self._shape.opening(self._head, index)
        return b"" if opening is None else self._event(opening)

    def _end(self, index: int, event: GeneratedEvent) -> Iterator[bytes]:
        self._ends[index] = event
        last = len(self._ends) == self._answers
        tail = self._tail([self._ends[one] for one in range(self._answers)]) if last else None
        # Clients that did not ask for a chunk without choices do not expect one.
        report = None if tail is None or self._counts else tail.report
        yield self._event(self._shape.end(self._head, index, event, report))
        if tail is not None:
            if self._counts:
                yield self._event(self._shape.count(self._head, tail))
            yield DONE

    def _event(self, chunk: Answer) -> bytes:
        return event_of(chunk.model_dump_json(exclude=None if self._counts else {"usage"}))

    def _error(self, error: ServeError) -> bytes:
        return event_of(json.dumps(error_body(error, self._path)))
