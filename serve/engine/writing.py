"""The text of one generation: from logits to a token, from tokens to text, until it is finished."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve.engine.job import (
    Deliver,
    Event,
    FailedEvent,
    FinishReason,
    GeneratedEvent,
    Job,
    ScoredToken,
    Span,
    State,
    TokenEvent,
    Work,
    in_requests,
    request_ids,
)
from serve.engine.sampling import Sampler, Sampling, choose_tokens, likelihood
from serve.errors import InternalError, ModelFailure, OutOfMemory, ServeError
from serve.inputs.text import StopFilter, TextCodec, TextStream
from serve.runtime.protocol import FloatArray

_log = logging.getLogger("stepdial")


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


class Generation(Work):
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
        begun = self._characters
        text = self._push(token)
        self._pieces.append(text)
        return TokenEvent(index, text, self._logprob(logits, token, begun))

    def _push(self, token: int) -> str:
        """The text that may be sent now."""
        completed = self._written.push(token)
        self._characters += len(completed)
        text, stopped = self._filter.push(completed)
        if not stopped and self.finish_reason is not None:
            unfinished = self._written.flush()
            self._characters += len(unfinished)
            rest, stopped = self._filter.push(unfinished)
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

    def _logprob(self, logits: FloatArray, token: int, begun: int) -> ScoredToken | None:
        """Of a token that was written behind so many characters, or behind bytes of a broken one,
        which its own bytes completed.
        """
        if self.request.logprobs is None:
            return None
        text = self._codec.decode([token])
        found = likelihood(logits, token, self.request.logprobs)
        logprob = ScoredToken(
            token=text,
            logprob=found.chosen,
            top=tuple((self._codec.decode([other]), value) for other, value in found.top),
            offset=max(begun, self._characters - len(text)),
        )
        self._logprobs.append(logprob)
        return logprob


def generation_of(job: Job) -> Generation:
    """The work of a job in a lane that generates."""
    assert isinstance(job.work, Generation)
    return job.work


def error_for_client(error: Exception, job: Job) -> ServeError:
    """The error for a client whose own row could not be processed."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory()
    ids = request_ids([job])
    _log.error(
        "a bug of ours%s: %s",
        *(in_requests(ids), error),
        exc_info=error,
        extra={"fields": {"requests": ids}},
    )
    return InternalError("the answer could not be put together: this is our bug, please report it")


_NO_NUMBERS = "the model's scores for the next token are not finite numbers"


def accept_tokens(jobs: Sequence[Job], logits: FloatArray) -> list[tuple[Job, Event]]:
    """The next token of each job that has not ended, from logits (B, V), chosen for all at once."""
    finite: list[bool] = np.logical_and.reduce(np.isfinite(logits), axis=1).tolist()  # (B,)
    good: list[int] = []
    works: list[Generation] = []
    events: list[tuple[Job, Event]] = []
    for index, job in enumerate(jobs):
        if job.state is State.ENDED:
            continue
        if finite[index]:
            good.append(index)
            works.append(generation_of(job))
        else:
            events.append((job, FailedEvent(ModelFailure(_NO_NUMBERS))))
    try:
        tokens = choose_tokens(
            [work.sampler for work in works],
            logits if len(good) == len(jobs) else logits[good],
            [work.completion_tokens for work in works],
        )
    except Exception as error:
        return [
            *events,
            *((jobs[index], FailedEvent(error_for_client(error, jobs[index]))) for index in good),
        ]
    for index, work, token in zip(good, works, tokens, strict=True):
        try:
            events.append((jobs[index], work.accept(token, logits[index])))
        except Exception as error:
            events.append((jobs[index], FailedEvent(error_for_client(error, jobs[index]))))
    return events
