"""From logits to a token, from tokens to text: the sampling and the text of a generation.

A token is the argmax of filtered log-probabilities plus Gumbel noise that depends on the seed and
the number of the token only, so a seed gives the same tokens whatever shares the batch.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
from serve.errors import InternalError, ModelFailure, OutOfMemory, ServeError
from serve.inputs.text import StopFilter, TextCodec, TextStream
from serve.runtime.protocol import FloatArray

_log = logging.getLogger("stepdial")

ScoreArray = npt.NDArray[np.float64]

MAX_SEED = 2**63 - 1
_TINY = float(np.finfo(np.float64).tiny)
_COLDEST = 1e-260  # like any lower temperature, and no float32 overflows


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: temperature, then the k likeliest, then the likeliest p of the rest."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Samples the tokens of one generation."""

    def __init__(self, sampling: Sampling, banned_tokens: tuple[int, ...] = ()) -> None:
        self.sampling = sampling
        self.banned = banned_tokens
        self.filters = sampling.top_k is not None or sampling.top_p < 1.0
        self.temperature = sampling.temperature and max(_COLDEST, sampling.temperature)
        # The counter is set for each token, so the state carries no history.
        self._bits = np.random.Philox(key=sampling.seed)
        self._state = self._bits.state
        self._uniform = np.random.Generator(self._bits)
        # From the last call of choose_following: the noise (P, V) from this token number on.
        self._noise: tuple[int, ScoreArray] = (0, np.empty((0, 0)))

    def choose_following(self, logits: FloatArray, first: int) -> list[int]:
        """The tokens for logits (P, V), as tokens `first` onwards; their noise is kept."""
        scores = logits.astype(np.float64)  # (P, V)
        _rule_out(scores, self.banned)
        if self.temperature > 0:
            noise = self._noise_from(first, len(scores), scores.shape[1])
            scores = _add_noise([self] * len(scores), scores, self.temperature, noise)
        chosen: list[int] = scores.argmax(axis=1).tolist()
        return chosen

    def _noise_from(self, first: int, count: int, size: int) -> ScoreArray:
        """Noise (P, V) of the tokens from this number on; most is known from the last call."""
        begun, known = self._noise
        if not begun <= first <= begun + len(known):
            begun, known = first, known[:0]
        unwanted = max(0, first - 1 - begun)  # the token before may be asked for again
        begun, known = begun + unwanted, known[unwanted:]
        numbers = range(begun + len(known), first + count)
        if numbers:
            new = _draw_noise([self] * len(numbers), numbers, size)
            known = np.concatenate([known, new]) if len(known) else new
        self._noise = begun, known
        return known[first - begun : first - begun + count]

    def keep_likeliest(self, scores: ScoreArray) -> None:
        """Rule out all but the likeliest of these scores (V,), whose maximum is 0."""
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        if top_k is not None and top_k < scores.size:
            # Stable: of equal scores the lower token stays, as with argmax.
            order = np.argsort(-scores, kind="stable")
            scores[order[top_k:]] = -np.inf
        if top_p < 1.0:
            order = np.argsort(-scores, kind="stable")
            probabilities = np.exp(scores[order])
            probabilities /= probabilities.sum()
            # A token stays while those before it have not reached p; the likeliest always does.
            before = np.cumsum(probabilities) - probabilities
            scores[order[before >= top_p]] = -np.inf

    def fill_uniform(self, number: int, row: ScoreArray) -> None:
        """Uniform numbers (V,) for one token: a function of (seed, number)."""
        state = self._state
        state["state"]["counter"][:] = (0, number, 0, 0)
        state["buffer_pos"] = 4  # nothing left over from another token
        state["has_uint32"] = 0
        self._bits.state = state
        self._uniform.random(out=row)


def choose_tokens(
    samplers: Sequence[Sampler], logits: FloatArray, numbers: Sequence[int]
) -> list[int]:
    """The token of each row of logits (B, V), as token of this number of its answer.

    All rows at once, since a call for each would take longer than small models do. They are of one
    model, so the same tokens are banned. A row's token does not depend on other rows.
    """
    if not samplers:  # no row has finite logits
        return []
    if len(samplers) == 1:
        return samplers[0].choose_following(logits, numbers[0])
    scores = logits.astype(np.float64)  # (B, V)
    _rule_out(scores, samplers[0].banned)
    drawn = [index for index, one in enumerate(samplers) if one.temperature > 0]
    if drawn:
        some = [samplers[index] for index in drawn]
        temperatures = np.array([[one.temperature] for one in some])  # (D, 1)
        noise = _draw_noise(some, [numbers[index] for index in drawn], scores.shape[1])
        scores[drawn] = _add_noise(some, scores[drawn], temperatures, noise)
    chosen: list[int] = scores.argmax(axis=1).tolist()
    return chosen


def _rule_out(scores: ScoreArray, tokens: Sequence[int]) -> None:
    """Give these few tokens the lowest scores (B, V)."""
    for token in tokens:
        scores[:, token] = -np.inf


def _draw_noise(samplers: Sequence[Sampler], numbers: Sequence[int], size: int) -> ScoreArray:
    """Gumbel noise (B, V) for these tokens."""
    noise = np.empty((len(samplers), size))
    for sampler, number, row in zip(samplers, numbers, noise, strict=True):
        sampler.fill_uniform(number, row)
    return -np.log(np.maximum(-np.log1p(-noise), _TINY))


def _add_noise(
    samplers: Sequence[Sampler],
    scores: ScoreArray,
    temperatures: float | ScoreArray,
    noise: ScoreArray,
) -> ScoreArray:
    """Scores (B, V), changed in place, whose argmax is a sample of each row's sampler."""
    scores -= scores.max(axis=1, keepdims=True)
    scores /= temperatures
    for row, sampler in zip(scores, samplers, strict=True):
        if sampler.filters:
            sampler.keep_likeliest(row)
    scores += noise
    return scores


def likelihood(
    logits: FloatArray, token: int, alternatives: int
) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of the chosen token under the model, and those of the likeliest tokens.

    Without temperature, filter and noise.
    """
    scores = log_softmax(logits)
    top = np.argsort(-scores, kind="stable")[:alternatives]
    return float(scores[token]), list(zip(top.tolist(), scores[top].tolist(), strict=True))


def log_softmax(logits: FloatArray | ScoreArray) -> ScoreArray:
    """Log-probabilities (..., V) of logits (..., V), in float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return scores


# The text of one generation, until it is finished.


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
        # A translation goes on from nothing: its prompt is the source.
        self._before = request.prompt if codec.bos_id is None else []
        self._written = TextStream(codec, self._before)
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
        return TextStream(self._codec, self._before).whole(self._tokens[self._prompt_tokens :])

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
        begin = self._codec.begin
        if self.request.prompt[: len(begin)] != begin:
            begin = []
        return begin + self._tokens[-max(1, self.request.window // 2 - len(begin)) :]

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
        begun, context = self._characters, self._written.context
        text = self._push(token)
        self._pieces.append(text)
        return TokenEvent(index, text, self._logprob(logits, token, begun, context))

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

    def _logprob(
        self, logits: FloatArray, token: int, begun: int, context: list[int]
    ) -> ScoredToken | None:
        """Of a token that was written behind so many characters, of which the context has the last,
        or behind bytes of a broken one, which its own bytes completed.
        """
        if self.request.logprobs is None:
            return None
        text = self._codec.decode_behind(context, token)
        chosen, top = likelihood(logits, token, self.request.logprobs)
        logprob = ScoredToken(
            token=text,
            logprob=chosen,
            top=tuple((self._codec.decode_behind(context, other), value) for other, value in top),
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
