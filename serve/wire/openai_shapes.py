"""The two shapes of answers that OpenAI's API has: of completions, and of chats.

Knows what becomes of the text and the tokens of an answer; deliberately neither requests nor how
a stream is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serve.engine.events import GeneratedEvent, TokenEvent, TokenLogprob
from serve.wire import openai_answers as shapes
from serve.wire.answers import Answer, Usage

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Tail:
    """What is known at the end."""

    usage: Usage
    report: shapes.DialReport


class Shape(Protocol):
    """How answers look. `index` is the number of an answer, None a chunk without one."""

    @property
    def prefix(self) -> str:
        """What ids begin with."""

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> Answer: ...

    def opening(self, head: Head, index: int) -> Answer | None:
        """What comes before the first token, if anything does."""

    def piece(self, head: Head, index: int, event: TokenEvent) -> Answer: ...

    def end(
        self,
        head: Head,
        index: int,
        event: GeneratedEvent,
        report: shapes.DialReport | None,
    ) -> Answer: ...

    def count(self, head: Head, tail: Tail) -> Answer: ...


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Of /v1/completions."""

    echoes: Sequence[str]  # what comes before each answer
    logprobs: bool
    prefix: str = "cmpl-"

    def whole(
        self, head: Head, events: Sequence[GeneratedEvent], tail: Tail
    ) -> shapes.CompletionResponse:
        return shapes.CompletionResponse(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                shapes.CompletionChoice(
                    index=index,
                    text=self.echoes[index] + event.text,
                    logprobs=_legacy(event.logprobs) if self.logprobs else None,
                    finish_reason=event.finish_reason,
                )
                for index, event in enumerate(events)
            ],
            usage=tail.usage,
            stepdial=tail.report,
        )

    def opening(self, head: Head, index: int) -> shapes.CompletionChunk | None:
        echo = self.echoes[index]
        return self._chunk(head, self._piece(index, echo)) if echo else None

    def piece(self, head: Head, index: int, event: TokenEvent) -> shapes.CompletionChunk:
        scores = None if event.logprob is None else _legacy([event.logprob])
        return self._chunk(head, self._piece(index, event.text, scores))

    def end(
        self,
        head: Head,
        index: int,
        event: GeneratedEvent,
        report: shapes.DialReport | None,
    ) -> shapes.CompletionChunk:
        piece = shapes.CompletionPiece(
            index=index, text="", logprobs=None, finish_reason=event.finish_reason
        )
        return self._chunk(head, piece, report=report)

    def count(self, head: Head, tail: Tail) -> shapes.CompletionChunk:
        return self._chunk(head, usage=tail.usage, report=tail.report)

    def _piece(
        self, index: int, text: str, scores: shapes.CompletionLogprobs | None = None
    ) -> shapes.CompletionPiece:
        return shapes.CompletionPiece(index=index, text=text, logprobs=scores, finish_reason=None)

    def _chunk(
        self,
        head: Head,
        *pieces: shapes.CompletionPiece,
        usage: Usage | None = None,
        report: shapes.DialReport | None = None,
    ) -> shapes.CompletionChunk:
        return shapes.CompletionChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[*pieces],
            usage=usage,
            stepdial=report,
        )


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Of /v1/chat/completions."""

    logprobs: bool
    prefix: str = "chatcmpl-"

    def whole(
        self, head: Head, events: Sequence[GeneratedEvent], tail: Tail
    ) -> shapes.ChatResponse:
        return shapes.ChatResponse(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                shapes.ChatChoice(
                    index=index,
                    message=shapes.AssistantMessage(content=event.text),
                    logprobs=_scores(event.logprobs) if self.logprobs else None,
                    finish_reason=event.finish_reason,
                )
                for index, event in enumerate(events)
            ],
            usage=tail.usage,
            stepdial=tail.report,
        )

    def opening(self, head: Head, index: int) -> shapes.ChatChunk:
        return self._chunk(head, index, shapes.ChatDelta(role="assistant", content=""))

    def piece(self, head: Head, index: int, event: TokenEvent) -> shapes.ChatChunk:
        scores = None if event.logprob is None else _scores([event.logprob])
        return self._chunk(head, index, shapes.ChatDelta(content=event.text), scores)

    def end(
        self,
        head: Head,
        index: int,
        event: GeneratedEvent,
        report: shapes.DialReport | None,
    ) -> shapes.ChatChunk:
        return self._chunk(head, index, shapes.ChatDelta(), None, event.finish_reason, report)

    def count(self, head: Head, tail: Tail) -> shapes.ChatChunk:
        return shapes.ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[],
            usage=tail.usage,
            stepdial=tail.report,
        )

    def _chunk(
        self,
        head: Head,
        index: int,
        delta: shapes.ChatDelta,
        scores: shapes.ChatLogprobs | None = None,
        finish_reason: shapes.FinishReason | None = None,
        report: shapes.DialReport | None = None,
    ) -> shapes.ChatChunk:
        piece = shapes.ChatPiece(
            index=index, delta=delta, logprobs=scores, finish_reason=finish_reason
        )
        return shapes.ChatChunk(
            id=head.id, created=head.created, model=head.model, choices=[piece], stepdial=report
        )


def _legacy(logprobs: Sequence[TokenLogprob]) -> shapes.CompletionLogprobs:
    return shapes.CompletionLogprobs(
        tokens=[one.token for one in logprobs],
        token_logprobs=[one.logprob for one in logprobs],
        top_logprobs=[_by_token(one) for one in logprobs],
        text_offset=[one.offset for one in logprobs],
    )


def _by_token(one: TokenLogprob) -> dict[str, float]:
    """Of tokens that look alike, as parts of characters do, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(token, logprob)
    return found


def _scores(logprobs: Sequence[TokenLogprob]) -> shapes.ChatLogprobs:
    return shapes.ChatLogprobs(
        content=[
            shapes.TokenLogprob(
                token=one.token,
                logprob=one.logprob,
                bytes=_bytes(one.token),
                top_logprobs=[
                    shapes.TopLogprob(token=token, logprob=logprob, bytes=_bytes(token))
                    for token, logprob in one.top
                ],
            )
            for one in logprobs
        ]
    )


def _bytes(token: str) -> list[int] | None:
    return None if _PART_OF_A_CHARACTER in token else [*token.encode()]
