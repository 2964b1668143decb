"""What one request computes: a generation, a translation or a classification, row by row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from serve.engine.job import (
    ClassifiedEvent,
    Deliver,
    Event,
    FinishReason,
    GeneratedEvent,
    Job,
    Labelled,
    ScoredToken,
    Scores,
    Span,
    Tags,
    TokenEvent,
)
from serve.engine.sampling import Beams, Sampler, Sampling, likelihood, softmax
from serve.errors import ModelFailure
from serve.inputs.text import StopFilter, TextCodec, TextStream
from serve.runtime import EarlyAnswers
from serve.runtime.protocol import FloatArray, Row


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller wants written."""

    prompt: list[int]  # or the source of a translation
    max_tokens: int
    window: int  # positions that the model sees; of a translation, those of the answer
    sampling: Sampling
    stops: Sequence[str] = ()
    logprobs: int | None = None  # how many alternatives to report with each token
    stream: bool = False
    num_beams: int = 1


class Generation:
    """An answer in the making, for one caller."""

    def __init__(self, wish: Wish, codec: TextCodec, deliver: Deliver) -> None:
        self.wish = wish
        self.deliver = deliver
        self.last_token_s: float | None = None  # for the metrics of the engine
        self.finish_reason: FinishReason | None = None
        self._codec = codec
        self._tokens = list(wish.prompt)
        self._prompt_tokens = len(wish.prompt)
        self.sampler = Sampler(wish.sampling, codec.banned_tokens)
        # Where nobody reads before the end, the text is made there, at once.
        self._by_pieces = wish.stream or bool(wish.stops) or wish.logprobs is not None
        self._written = TextStream(codec)
        self._filter = StopFilter(wish.stops)
        self._pieces: list[str] = []
        self._characters = 0  # that are complete, those that the filter holds back included
        self._logprobs: list[ScoredToken] = []

    @property
    def completion_tokens(self) -> int:
        return len(self._tokens) - self._prompt_tokens

    @property
    def text(self) -> str:
        """What has been written so far."""
        if self._by_pieces:
            return "".join(self._pieces)
        return self._codec.decode(self._tokens[len(self.wish.prompt) :])

    @property
    def last_token(self) -> int:
        """The token to decode next."""
        return self._tokens[-1]

    @property
    def prompt(self) -> list[int]:
        """The tokens to read when this enters a batch.

        At first the prompt itself; after the window has filled, its last half, so that there is
        room to go on writing.
        """
        if self.completion_tokens == 0:
            return self.wish.prompt
        return self._tokens[-max(1, self.wish.window // 2) :]

    def drafts(self, logits: FloatArray, ahead: int) -> list[int]:
        """The tokens that logits (P, V) choose, the first of them so many behind the next one.

        Up to the first that choose none, or behind whose token none would be wanted.
        """
        first = self.completion_tokens + ahead
        count = min(len(logits), max(0, self.wish.max_tokens - 1 - first))
        finite = np.isfinite(logits[:count])
        if not finite.all():
            count = int(finite.all(axis=1).argmin())
        return self.sampler.choose_following(logits[:count], first)

    def accept(self, token: int, logits: FloatArray) -> TokenEvent:
        """Take the next token, chosen from logits (V,); sets `finish_reason` if it is the last."""
        index = len(self._tokens) - self._prompt_tokens
        self._tokens.append(token)
        if token == self._codec.eos_id:
            self.finish_reason = "stop"
        elif index + 1 == self.wish.max_tokens:
            self.finish_reason = "length"
        if not self._by_pieces:
            return TokenEvent(index, "")
        logprob = self._logprob(logits, token)
        text = self._push(token)
        self._pieces.append(text)
        return TokenEvent(index, text, logprob)

    def _push(self, token: int) -> str:
        """The text that may be given out by now."""
        completed = self._written.push(token)
        self._characters += len(completed)
        text, stopped = self._filter.push(completed)
        if not stopped and self.finish_reason is not None:
            rest, stopped = self._filter.push(self._written.flush())
            text += rest + self._filter.flush()
        if stopped:
            self.finish_reason = "stop"
        return text

    def finished(self, span: Span) -> GeneratedEvent:
        """The whole answer."""
        assert self.finish_reason is not None
        return GeneratedEvent(
            finish_reason=self.finish_reason,
            text=self.text,
            completion_tokens=self.completion_tokens,
            logprobs=tuple(self._logprobs),
            span=span,
        )

    def _logprob(self, logits: FloatArray, token: int) -> ScoredToken | None:
        if self.wish.logprobs is None:
            return None
        found = likelihood(logits, token, self.wish.logprobs)
        logprob = ScoredToken(
            token=self._codec.decode([token]),
            logprob=found.chosen,
            top=tuple((self._codec.decode([other]), value) for other, value in found.top),
            offset=self._characters,
        )
        self._logprobs.append(logprob)
        return logprob


# The work of one classify request: its rows, and their labels as they come in.


_NO_NUMBERS = "the model's scores for this input are not finite numbers"


def labelled_rows(found: EarlyAnswers, rows: Sequence[Row]) -> list[Labelled | ModelFailure]:
    """The labels of each row, or that its logits are no numbers."""
    logits = found.logits
    if found.readouts is None and logits.ndim == 2:
        return [
            one if isinstance(one, ModelFailure) else Labelled(one) for one in scores_of(logits)
        ]
    answered: list[Labelled | ModelFailure] = []
    for place, row in enumerate(rows):
        read = _read(logits[place], len(row))
        readouts: Iterable[FloatArray] = () if found.readouts is None else found.readouts[:, place]
        steps = [_read(one, len(row)) for one in readouts]
        if read is None or None in steps:
            answered.append(ModelFailure(_NO_NUMBERS))
        else:
            answered.append(Labelled(read, tuple(one for one in steps if one is not None)))
    return answered


def scores_of(logits: FloatArray) -> list[Scores | ModelFailure]:
    """The scores of each row of logits (B, C), or that they are no numbers."""
    finite = np.logical_and.reduce(np.isfinite(logits), axis=1)  # (B,)
    with np.errstate(invalid="ignore"):
        scores: list[list[float]] = softmax(logits).tolist()
    return [
        tuple(row) if good else ModelFailure(_NO_NUMBERS)
        for row, good in zip(scores, finite.tolist(), strict=True)
    ]


def answer_of(logits: FloatArray, row: Row) -> tuple[int, ...]:
    """The likeliest label of a row's logits (C,), or of each of its positions' (N, C)."""
    if logits.ndim == 1:
        return (int(logits.argmax()),)
    return tuple(logits[: len(row)].argmax(axis=-1).tolist())


def _read(logits: FloatArray, positions: int) -> Scores | Tags | None:
    """What logits (C,) or (N, C) say, of which so many positions are no padding."""
    kept = logits if logits.ndim == 1 else logits[:positions]
    if not np.isfinite(kept).all():
        return None
    scores = softmax(kept)
    if logits.ndim == 1:
        return tuple(scores.tolist())
    return Tags(tuple(kept.argmax(axis=-1).tolist()), tuple(scores.max(axis=-1).tolist()))


class Classification:
    """Rows to classify, for one caller."""

    def __init__(self, rows: Sequence[Row], deliver: Deliver) -> None:
        self.rows = rows
        self.deliver = deliver
        self._labelled: list[Labelled | None] = [None] * len(rows)
        self._steps = [0] * len(rows)
        self._evaluations = [0] * len(rows)

    def accept(self, row: int, labelled: Labelled, steps: int, evaluations: int) -> None:
        """Take a row's answer, its rung and its cost."""
        self._labelled[row] = labelled
        self._steps[row] = steps
        self._evaluations[row] = evaluations

    def finished(self, span: Span) -> ClassifiedEvent:
        """The answer, once every row has its own."""
        rows = tuple(one for one in self._labelled if one is not None)
        assert len(rows) == len(self._labelled), "a row without an answer"
        return ClassifiedEvent(rows, tuple(self._steps), tuple(self._evaluations), span)


# The work of one request for a translation by beam search.


class Translation:
    """A translation in the making, for one caller; nothing of it is known before its end."""

    def __init__(self, wish: Wish, codec: TextCodec, deliver: Deliver) -> None:
        assert codec.bos_id is not None and codec.eos_id is not None
        self.wish = wish
        self.deliver = deliver
        self._codec = codec
        self._beams = Beams(
            wish.num_beams, wish.max_tokens, codec.bos_id, codec.eos_id, codec.banned_tokens
        )

    @property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """What to run next (B, N)."""
        return self._beams.prefixes

    @property
    def over(self) -> bool:
        return self._beams.over

    def accept(self, logits: FloatArray) -> None:
        """Take the logits (B, V) after each prefix; ModelFailure if they are no numbers."""
        if not np.isfinite(logits).all():
            raise ModelFailure("the model's scores for the next token are not finite numbers")
        self._beams.grow(logits)

    def finished(self, span: Span) -> tuple[TokenEvent, GeneratedEvent]:
        """The whole answer, as the one piece of a stream and as its end."""
        best = self._beams.best
        ended = best.tokens[-1] == self._codec.eos_id
        filter_ = StopFilter(self.wish.stops)
        text, stopped = filter_.push(self._codec.decode(list(best.tokens)))
        text += filter_.flush()
        reason: FinishReason = "stop" if stopped or ended else "length"
        return TokenEvent(0, text), GeneratedEvent(reason, text, len(best.tokens), (), span)


# What a job carries through the engine, and what comes of it.


Work = Classification | Generation | Translation
Deliveries = list[tuple[Deliver, Event]]

WorkT = TypeVar("WorkT", Classification, Generation, Translation)


def work_as(kind: type[WorkT], job: Job[Work]) -> WorkT:
    """The work of a job of which the lane says what it is."""
    assert isinstance(job.work, kind)
    return job.work
