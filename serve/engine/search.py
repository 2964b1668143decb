"""Beam searches: their queue, and one step of one search at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serve.engine.cost import CostKey
from serve.engine.job import (
    CallKind,
    Deliver,
    Deliveries,
    Event,
    FailedEvent,
    FinishReason,
    GeneratedEvent,
    Job,
    LaneKey,
    Span,
    State,
    TokenEvent,
    Waiting,
    Work,
)
from serve.engine.loaded import Call, EngineModel
from serve.engine.writing import GenerationRequest, ScoreArray, error_for_client, log_softmax
from serve.errors import ModelFailure
from serve.inputs.text import StopFilter, TextCodec
from serve.runtime import RunningTranslation
from serve.runtime.protocol import FloatArray


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A translation so far; its tokens are without bos, and with eos."""

    tokens: tuple[int, ...]
    total: float  # sum of log-probabilities

    @property
    def score(self) -> float:
        return self.total / len(self.tokens)


class Beams:
    """One beam search: its live hypotheses, all of one length, and the finished ones.

    Each round ranks all continuations by the sum of log-probabilities over allowed tokens; equal
    ones by the rank of what they continue, then by the lower token. Of the first W, those that end
    are finished, up to W of them; the first W that do not end stay live. The answer is the finished
    hypothesis with the greatest mean log-probability a token, eos included, or the first live one.
    """

    def __init__(
        self, width: int, max_tokens: int, bos_id: int, eos_id: int, banned: tuple[int, ...] = ()
    ) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._bos_id = bos_id
        self._eos_id = eos_id
        self._banned = list(banned)
        self._live = [Hypothesis((), 0.0)]
        self._finished: list[Hypothesis] = []

    @property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """The prefixes to run next (B, N), with bos."""
        return np.array([(self._bos_id, *one.tokens) for one in self._live], dtype=np.int64)

    @property
    def over(self) -> bool:
        """Whether the search is over."""
        return (
            not self._live
            or len(self._finished) >= self._width
            or len(self._live[0].tokens) >= self._max_tokens
        )

    @property
    def best(self) -> Hypothesis:
        """The answer, once the search is over; where it was cut, the best live one counts too."""
        cut = self._live[:1] if len(self._finished) < self._width else []
        return max([*self._finished, *cut], key=lambda one: one.score)  # the first of equal ones

    def grow(self, logits: FloatArray) -> None:
        """Take the logits (B, V) after each prefix, and keep the likeliest continuations."""
        allowed = logits.astype(np.float64)  # (B, V)
        allowed[:, self._banned] = -np.inf
        # Each live hypothesis ends in one way only, so twice the width leaves enough live ones.
        ranked = self._ranked(log_softmax(allowed), 2 * self._width)
        for one in ranked[: self._width]:
            if one.tokens[-1] == self._eos_id and len(self._finished) < self._width:
                self._finished.append(one)
        self._live = [one for one in ranked if one.tokens[-1] != self._eos_id][: self._width]

    def _ranked(self, scores: ScoreArray, count: int) -> list[Hypothesis]:
        """The best `count` continuations, from log-probabilities (B, V) of the next token."""
        totals = (scores + np.array([[one.total] for one in self._live])).ravel()  # (B * V,)
        count = min(count, len(totals))
        least = np.partition(totals, len(totals) - count)[len(totals) - count]
        places = np.flatnonzero(totals >= least)  # ascending: the order of equal ones
        order = places[np.argsort(-totals[places], kind="stable")][:count]
        return [
            Hypothesis((*self._live[row].tokens, token), float(totals[place]))
            for place in order.tolist()
            if totals[place] > -np.inf
            for row, token in [divmod(place, scores.shape[1])]
        ]


class Translation(Work):
    """A translation by beam search, for one client. Its text is known only at the end."""

    def __init__(self, request: GenerationRequest, codec: TextCodec, deliver: Deliver) -> None:
        assert codec.bos_id is not None and codec.eos_id is not None
        self.request = request
        self.deliver = deliver
        self._codec = codec
        self.beams = Beams(
            request.num_beams, request.max_tokens, codec.bos_id, codec.eos_id, codec.banned_tokens
        )

    def accept(self, logits: FloatArray) -> None:
        """Take the logits (B, V) after each prefix; ModelFailure if they are not finite."""
        if not np.isfinite(logits).all():
            raise ModelFailure("the model's scores for the next token are not finite numbers")
        self.beams.grow(logits)

    def finished(self, span: Span) -> tuple[TokenEvent, GeneratedEvent]:
        """The whole answer, as one piece of a stream and as its end."""
        best = self.beams.best
        ended = best.tokens[-1] == self._codec.eos_id
        filter_ = StopFilter(self.request.stops)
        text, stopped = filter_.push(self._codec.decode(list(best.tokens)))
        text += filter_.flush()
        reason: FinishReason = "stop" if stopped or ended else "length"
        return TokenEvent(0, text), GeneratedEvent(reason, text, len(best.tokens), (), span)


class SearchStep(NamedTuple):
    """What one call of a search has given."""

    begun_s: float
    ran_s: float
    shape: tuple[int, ...]  # of the prefixes
    events: tuple[Event, ...]  # if it is over


class SearchLane:
    """One rung's beam searches. Each is a batch of its own; a call is one step of one search."""

    def __init__(self, key: LaneKey, model: EngineModel) -> None:
        self.key = key
        self.model = model
        self.waiting = Waiting()
        self.running: deque[Job] = deque()
        self._batches = model.batches(key.steps)
        self._sources: dict[Job, RunningTranslation] = {}  # of running searches, once read

    def add(self, job: Job) -> None:
        self.waiting.add(job)

    def drop(self, job: Job) -> None:
        if job.state is State.QUEUED:
            self.waiting.take(job)

    def sweep(self) -> None:
        over = [job for job in self.running if job.state is State.ENDED]
        for job in over:
            self.running.remove(job)
            self._sources.pop(job, None)

    def busy(self) -> Sequence[CallKind]:
        return ("search",) if self.running or self.waiting else ()

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self._sources.values())

    def occupants(self) -> Sequence[Job]:
        return self.running

    def charged_bytes(self, extra: Job | None = None) -> int:
        jobs = self.running if extra is None else [*self.running, extra]
        return sum(self._batches.bytes_for(job.positions, 1) for job in jobs)

    def plan(self, now_s: float) -> Call | None:
        if self.waiting and self.model.common.may_enter(self):
            job = self.waiting.take(self.waiting[0])
            self.model.common.jobs.start(job, now_s)
            self.running.append(job)
        if not self.running:
            return None
        self.running.rotate(-1)  # searches alternate
        return Call(self, self.key, "search", (self.running[-1],))

    def run(self, call: Call) -> SearchStep:
        (job,) = call.jobs
        begun_s = self.model.common.clock()
        work = translation_of(job)
        prefixes = work.beams.prefixes  # (B, N)
        if job not in self._sources:
            translator = self.model.runtime.translator(self.key.steps)
            self._sources[job] = translator.read(np.array(work.request.prompt, np.int64))
        logits = self._sources[job].follow(prefixes)  # (B, V)
        ran_s = self.model.common.clock()
        events: tuple[Event, ...] = ()
        try:
            work.accept(logits)
            if work.beams.over:
                events = work.finished(job.span(ran_s))
        except Exception as error:
            events = (FailedEvent(error_for_client(error, job)),)
        return SearchStep(begun_s, ran_s, prefixes.shape, events)

    def apply(self, call: Call, result: SearchStep | Exception) -> Deliveries:
        model, (job,) = self.model, call.jobs
        if isinstance(result, Exception):
            return model.fail(self.key, call.jobs, result)
        begun_s, ran_s, (rows, length), events = result
        model.threw = None
        model.count_call(self.key, "search", rows)
        deliveries: Deliveries = []
        job.tokens_left -= 1
        if events and model.common.jobs.end(job):
            self._observe_end(job, events[-1], ran_s)
            stream = translation_of(job).request.stream
            deliveries = [
                (job.work.deliver, event)
                for event in events
                if stream or not isinstance(event, TokenEvent)
            ]
        model.cost.observe_usual((self.key, "search"), ran_s - begun_s)
        kind: CallKind = "search"
        if length == 1:  # the first call also reads the source
            kind, length = "prefill", job.lengths[0]
        # Including what follows the call, since the next call waits for that too.
        spent_s = model.common.clock() - begun_s
        model.cost.observe(CostKey(kind, self.key.steps), rows, length, spent_s)
        return deliveries

    def usual_s(self, call: Call) -> list[float | None]:
        return [self.model.cost.usual_s((self.key, "search"))]

    def _observe_end(self, job: Job, event: Event, now_s: float) -> None:
        assert job.started_s is not None
        metrics, labels = self.model.common.metrics, (job.lane.name, str(job.lane.steps))
        metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)
        if isinstance(event, GeneratedEvent):
            metrics.tokens.labels(job.lane.name).inc(event.completion_tokens)
            metrics.first_token_seconds.labels(*labels).observe(now_s - job.queued_s)


def translation_of(job: Job) -> Translation:
    """The work of a job in a lane that searches."""
    assert isinstance(job.work, Translation)
    return job.work
