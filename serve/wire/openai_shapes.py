"""The two shapes of answers that OpenAI's API has: of completions, and of chats.

Knows what becomes of the text and the tokens of an answer; deliberately neither requests nor how
a stream is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serve.engine.job import GeneratedEvent, TokenEvent, TokenLogprob
from serve.wire import openai_answers as shapes
from serve.wire.answers import Answer, Usage
from serve.wire.pieces import Each

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

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> dict[str, object]:
        """All of it, as the documented shape has it: not made of that, since it may be large."""

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

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> dict[str, object]:
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "text": self.echoes[index] + event.text,
                "logprobs": _columns(event.logprobs) if self.logprobs else None,
                "finish_reason": event.finish_reason,
            }
            for index, event in enumerate(events)
        ]
        return _whole("text_completion", head, choices, tail)

    def opening(self, head: Head, index: int) -> shapes.CompletionChunk | None:
        echo = self.echoes[index]
        return self._chunk(head, self._piece(index, echo)) if echo else None

    def piece(self, head: Head, index: int, event: TokenEvent) -> shapes.CompletionChunk:
        scores = None if event.logprob is None else _legacy(event.logprob)
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

    def whole(self, head: Head, events: Sequence[GeneratedEvent], tail: Tail) -> dict[str, object]:
        choices: list[dict[str, object]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": event.text, "refusal": None},
                "logprobs": _content(event.logprobs) if self.logprobs else None,
                "finish_reason": event.finish_reason,
            }
            for index, event in enumerate(events)
        ]
        return _whole("chat.completion", head, choices, tail)

    def opening(self, head: Head, index: int) -> shapes.ChatChunk:
        return self._chunk(head, index, shapes.ChatDelta(role="assistant", content=""))

    def piece(self, head: Head, index: int, event: TokenEvent) -> shapes.ChatChunk:
        scores = None if event.logprob is None else _scores(event.logprob)
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


def _whole(
    kind: str, head: Head, choices: Sequence[dict[str, object]], tail: Tail
) -> dict[str, object]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": tail.usage,
        "stepdial": tail.report,
    }


def _columns(logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """CompletionLogprobs of a whole answer."""
    return {
        "tokens": Each(one.token for one in logprobs),
        "token_logprobs": Each(one.logprob for one in logprobs),
        "top_logprobs": Each(map(_by_token, logprobs)),
        "text_offset": Each(one.offset for one in logprobs),
    }


def _content(logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """ChatLogprobs of a whole answer."""
    return {"content": Each(map(_place, logprobs)), "refusal": None}


def _place(one: TokenLogprob) -> dict[str, object]:
    return _alternative(one.token, one.logprob) | {
        "top_logprobs": [_alternative(token, logprob) for token, logprob in one.top]
    }


def _alternative(token: str, logprob: float) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": _bytes(token)}


def _legacy(one: TokenLogprob) -> shapes.CompletionLogprobs:
    return shapes.CompletionLogprobs(
        tokens=[one.token],
        token_logprobs=[one.logprob],
        top_logprobs=[_by_token(one)],
        text_offset=[one.offset],
    )


def _by_token(one: TokenLogprob) -> dict[str, float]:
    """Of tokens that look alike, as parts of characters do, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        found.setdefault(token, logprob)
    return found


def _scores(one: TokenLogprob) -> shapes.ChatLogprobs:
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
        ]
    )


def _bytes(token: str) -> list[int] | None:
    return None if _PART_OF_A_CHARACTER in token else [*token.encode()]
