"""What a job computes: a generation, a classification, or a translation by beam search."""

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
class GenerationRequest:
    """What a client asks to generate."""

    prompt: list[int]  # for a translation: the source
    max_tokens: int
    window: int  # positions that the model sees; for a translation, those of the answer
    sampling: Sampling
    stops: Sequence[str] = ()
    logprobs: int | None = None  # number of alternatives to report with each token
    stream: bool = False
    num_beams: int = 1


class Generation:
    """A generation in progress, for one client."""

    def __init__(self, request: GenerationRequest, codec: TextCodec, deliver: Deliver) -> None:
        self.request = request
        self.deliver = deliver
        self.last_token_s: float | None = None  # for metrics
        self.finish_reason: FinishReason | None = None
        self._codec = codec
        self._tokens = list(request.prompt)
        self._prompt_tokens = len(request.prompt)
        self.sampler = Sampler(request.sampling, codec.banned_tokens)
        # If nobody reads pieces, the text is decoded once, at the end.
        self._by_pieces = request.stream or bool(request.stops) or request.logprobs is not None
        self._written = TextStream(codec)
        self._filter = StopFilter(request.stops)
        self._pieces: list[str] = []
        self._characters = 0  # complete ones, including those that the stop filter holds back
        self._logprobs: list[ScoredToken] = []

    @property
    def completion_tokens(self) -> int:
        return len(self._tokens) - self._prompt_tokens

    @property
    def text(self) -> str:
        """The text so far."""
        if self._by_pieces:
            return "".join(self._pieces)
        return self._codec.decode(self._tokens[len(self.request.prompt) :])

    @property
    def last_token(self) -> int:
        """The token to decode next."""
        return self._tokens[-1]

    @property
    def prompt(self) -> list[int]:
        """The tokens to prefill when this enters a batch.

        At first the prompt; after the window has filled, its last half, to leave room for more.
        """
        if self.completion_tokens == 0:
            return self.request.prompt
        return self._tokens[-max(1, self.request.window // 2) :]

    def drafts(self, logits: FloatArray, ahead: int) -> list[int]:
        """Draft tokens from logits (P, V), the first of them `ahead` behind the next one.

        Up to the first position without finite logits, or after which no token is wanted.
        """
        first = self.completion_tokens + ahead
        count = min(len(logits), max(0, self.request.max_tokens - 1 - first))
        finite = np.isfinite(logits[:count])
        if not finite.all():
            count = int(finite.all(axis=1).argmin())
        return self.sampler.choose_following(logits[:count], first)

    def accept(self, token: int, logits: FloatArray) -> TokenEvent:
        """Take the next token, chosen from logits (V,). Sets `finish_reason` if it is the last."""
        index = len(self._tokens) - self._prompt_tokens
        self._tokens.append(token)
        if token == self._codec.eos_id:
            self.finish_reason = "stop"
        elif index + 1 == self.request.max_tokens:
            self.finish_reason = "length"
        if not self._by_pieces:
            return TokenEvent(index, "")
        logprob = self._logprob(logits, token)
        text = self._push(token)
        self._pieces.append(text)
        return TokenEvent(index, text, logprob)

    def _push(self, token: int) -> str:
        """The text that may be sent now."""
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
        if self.request.logprobs is None:
            return None
        found = likelihood(logits, token, self.request.logprobs)
        logprob = ScoredToken(
            token=self._codec.decode([token]),
            logprob=found.chosen,
            top=tuple((self._codec.decode([other]), value) for other, value in found.top),
            offset=self._characters,
        )
        self._logprobs.append(logprob)
        return logprob


_NO_NUMBERS = "the model's scores for this input are not finite numbers"


def labelled_rows(found: EarlyAnswers, rows: Sequence[Row]) -> list[Labelled | ModelFailure]:
    """The labels of each row, or an error if its logits are not finite."""
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
    """The scores of each row of logits (B, C), or an error if they are not finite."""
    finite = np.logical_and.reduce(np.isfinite(logits), axis=1)  # (B,)
    with np.errstate(invalid="ignore"):
        scores: list[list[float]] = softmax(logits).tolist()
    return [
        tuple(row) if good else ModelFailure(_NO_NUMBERS)
        for row, good in zip(scores, finite.tolist(), strict=True)
    ]


def embedded_rows(embeddings: FloatArray) -> list[Labelled | ModelFailure]:
    """The embedding of each row (B, D), or an error if it is not finite."""
    finite = np.logical_and.reduce(np.isfinite(embeddings), axis=1)  # (B,)
    return [
        Labelled(tuple(row)) if good else ModelFailure(_NO_NUMBERS)
        for row, good in zip(embeddings.tolist(), finite.tolist(), strict=True)
    ]


def answer_of(logits: FloatArray, row: Row) -> tuple[int, ...]:
    """The likeliest label of a row's logits (C,), or of each position of (N, C)."""
    if logits.ndim == 1:
        return (int(logits.argmax()),)
    return tuple(logits[: len(row)].argmax(axis=-1).tolist())


def _read(logits: FloatArray, positions: int) -> Scores | Tags | None:
    """The scores in logits (C,), or in the first `positions` of (N, C); None if not finite."""
    kept = logits if logits.ndim == 1 else logits[:positions]
    if not np.isfinite(kept).all():
        return None
    scores = softmax(kept)
    if logits.ndim == 1:
        return tuple(scores.tolist())
    return Tags(tuple(kept.argmax(axis=-1).tolist()), tuple(scores.max(axis=-1).tolist()))


class Classification:
    """Rows to classify, for one client."""

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


class Translation:
    """A translation by beam search, for one client. Its text is known only at the end."""

    def __init__(self, request: GenerationRequest, codec: TextCodec, deliver: Deliver) -> None:
        assert codec.bos_id is not None and codec.eos_id is not None
        self.request = request
        self.deliver = deliver
        self._codec = codec
        self._beams = Beams(
            request.num_beams, request.max_tokens, codec.bos_id, codec.eos_id, codec.banned_tokens
        )

    @property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """The prefixes to run next (B, N)."""
        return self._beams.prefixes

    @property
    def over(self) -> bool:
        return self._beams.over

    def accept(self, logits: FloatArray) -> None:
        """Take the logits (B, V) after each prefix; ModelFailure if they are not finite."""
        if not np.isfinite(logits).all():
            raise ModelFailure("the model's scores for the next token are not finite numbers")
        self._beams.grow(logits)

    def finished(self, span: Span) -> tuple[TokenEvent, GeneratedEvent]:
        """The whole answer, as one piece of a stream and as its end."""
        best = self._beams.best
        ended = best.tokens[-1] == self._codec.eos_id
        filter_ = StopFilter(self.request.stops)
        text, stopped = filter_.push(self._codec.decode(list(best.tokens)))
        text += filter_.flush()
        reason: FinishReason = "stop" if stopped or ended else "length"
        return TokenEvent(0, text), GeneratedEvent(reason, text, len(best.tokens), (), span)


Work = Classification | Generation | Translation
Deliveries = list[tuple[Deliver, Event]]

WorkT = TypeVar("WorkT", Classification, Generation, Translation)


def work_as(kind: type[WorkT], job: Job[Work]) -> WorkT:
    """The work of a job, whose lane says its kind."""
    assert isinstance(job.work, kind)
    return job.work
