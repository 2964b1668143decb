"""Carries out the scheduler's calls: runs the model, takes the results in, ends what is over.

Used by the engine's thread alone, and takes the engine's lock only while it touches the scheduler.
It deliberately knows neither when to run nor who is told: it returns the events that came of it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from serve.classification import Classification
from serve.errors import InternalError, ModelFailure, ServeError
from serve.events import Deliver, Event, FailedEvent, GeneratedEvent, Span, TokenEvent
from serve.generation import Generation
from serve.job import (
    Call,
    ClassifyCall,
    DecodeCall,
    Job,
    LaneKey,
    PrefillCall,
    SearchCall,
    State,
)
from serve.metrics import Metrics
from serve.pace import CallTimes
from serve.runner import Runner
from serve.sampling import FloatArray
from serve.scheduler import Scheduler
from serve.translation import Translation

Work = Classification | Generation | Translation
Deliveries = list[tuple[Deliver, Event]]
WorkT = TypeVar("WorkT", Classification, Generation, Translation)

_log = logging.getLogger("stepdial")


class Executor:
    """The part of the engine that runs models."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        runner: Runner,
        lock: threading.Condition,
        times: CallTimes,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._times = times
        self._metrics = metrics
        self._clock = clock

    def execute(self, call: Call[Work]) -> Deliveries:
        """Run one call to its end; whatever the runtime throws ends the requests in it only."""
        match call:
            case ClassifyCall():
                return self._classify(call)
            case SearchCall():
                return self._search(call)
            case PrefillCall():
                deliveries = self._prefill(call)
            case DecodeCall():
                deliveries = self._decode(call)
        with self._lock:
            self._scheduler.hold(call.lane, self._runner.held_bytes(call.lane))
        return deliveries

    def end_all(self, error: ServeError) -> Deliveries:
        """End every job there is. The caller holds the lock."""
        deliveries: Deliveries = []
        for job in self._scheduler.jobs():
            self._end(job, FailedEvent(error), deliveries)
        return deliveries

    def _classify(self, call: ClassifyCall[Work]) -> Deliveries:
        begun_s = self._clock()
        rows = [(job, _as(Classification, job), row) for job, row in call.rows]
        try:
            found = self._runner.classify(call.lane, [work.rows[row] for _, work, row in rows])
        except Exception as error:
            return self._fail(call.lane, [job for job, _ in call.rows], error)
        spent: list[int] = found.evaluations.tolist()
        now_s = self._ran(call.lane, "classify", begun_s, len(rows), sum(spent))
        failures: dict[Job[Work], ServeError] = {}
        for (job, work, row), logits, count in zip(rows, found.logits, spent, strict=True):
            try:
                work.accept(row, logits, count)
            except Exception as error:
                failures[job] = _own(error)
        deliveries: Deliveries = []
        with self._lock:
            for job, failure in failures.items():
                self._end(job, FailedEvent(failure), deliveries)
            for job, work, _ in rows:
                if self._scheduler.row_done(job):
                    self._observe_queue(job)
                    deliveries.append((work.deliver, work.finished(_span(job, now_s))))
        return deliveries

    def _prefill(self, call: PrefillCall[Work]) -> Deliveries:
        begun_s = self._clock()
        try:
            self._runner.remove(call.lane, call.evict)
            logits = self._runner.prefill(call.lane, _as(Generation, call.job).prompt)  # (V,)
        except Exception as error:
            return self._fail_prefill(call, error)
        now_s = self._ran(call.lane, "prefill", begun_s, 1)
        return self._accept(call.lane, (call.job,), logits[None], now_s)

    def _decode(self, call: DecodeCall[Work]) -> Deliveries:
        begun_s = self._clock()
        try:
            self._runner.remove(call.lane, call.evict)
            if not call.jobs:
                return []
            tokens = [_as(Generation, job).last_token for job in call.jobs]
            logits = self._runner.decode(call.lane, tokens)  # (B, V)
        except Exception as error:
            return self._lose_batch(call.lane, error)
        now_s = self._ran(call.lane, "decode", begun_s, len(call.jobs))
        return self._accept(call.lane, call.jobs, logits, now_s)

    def _accept(
        self, lane: LaneKey, jobs: tuple[Job[Work], ...], logits: FloatArray, now_s: float
    ) -> Deliveries:
        """Turn logits (B, V) into one token for each job, and let go of those that are done."""
        events: list[tuple[Job[Work], Generation, Event]] = []
        for job, row in zip(jobs, logits, strict=True):
            if job.state is State.ENDED:
                continue
            work = _as(Generation, job)
            try:
                events.append((job, work, work.accept(row)))
            except Exception as error:
                events.append((job, work, FailedEvent(_own(error))))
        cached = self._runner.lengths(lane)
        deliveries: Deliveries = []
        with self._lock:
            for job, work, event in events:
                if job.state is State.ENDED:
                    continue  # the client left while the token was made
                if isinstance(event, FailedEvent):
                    self._end(job, event, deliveries)
                    continue
                self._observe_token(job, work, now_s)
                if work.wish.stream:
                    deliveries.append((work.deliver, event))
                if work.finish_reason is not None:
                    self._end(job, work.finished(_span(job, now_s)), deliveries)
            for job, length in zip(self._scheduler.rows(lane), cached, strict=True):
                full = length >= _as(Generation, job).wish.window
                if full and job.state is not State.ENDED:
                    self._scheduler.read_again(job)
            evict = self._scheduler.evict(lane)
        self._runner.remove(lane, evict)
        return deliveries

    def _search(self, call: SearchCall[Work]) -> Deliveries:
        """One step of one beam search; frees the memory of those that are over."""
        self._runner.forget(job.number for job in call.over)
        deliveries = [] if call.job is None else self._step(call.lane, call.job)
        with self._lock:
            over = self._scheduler.forget(call.lane)
        self._runner.forget(job.number for job in over)
        return deliveries

    def _step(self, lane: LaneKey, job: Job[Work]) -> Deliveries:
        begun_s = self._clock()
        work = _as(Translation, job)
        prefixes = work.prefixes  # (B, N)
        try:
            logits = self._runner.search(lane, job.number, work.wish.prompt, prefixes)  # (B, V)
        except Exception as error:
            return self._fail(lane, [job], error)
        now_s = self._ran(lane, "search", begun_s, len(prefixes))
        deliveries: Deliveries = []
        try:
            work.accept(logits)
            events: tuple[Event, ...] = work.finished(_span(job, now_s)) if work.over else ()
        except Exception as error:
            events = (FailedEvent(_own(error)),)
        with self._lock:
            if events and self._scheduler.end(job):
                self._observe_translation(job, events[-1], now_s)
                deliveries = [
                    (work.deliver, event)
                    for event in events
                    if work.wish.stream or not isinstance(event, TokenEvent)
                ]
        return deliveries

    # What goes wrong.

    def _fail(self, lane: LaneKey, jobs: Iterable[Job[Work]], error: Exception) -> Deliveries:
        _log.error("%s failed at %d steps: %s", lane.model, lane.steps, error, exc_info=error)
        self._metrics.runtime_failures.labels(lane.model).inc()
        failure = ModelFailure(
            f"{lane.model} failed at {lane.steps} steps: try again, or with other steps"
        )
        deliveries: Deliveries = []
        with self._lock:
            for job in jobs:
                self._end(job, FailedEvent(failure), deliveries)
        return deliveries

    def _fail_prefill(self, call: PrefillCall[Work], error: Exception) -> Deliveries:
        """A prompt could not be read: the other rows have not been touched, if all are there."""
        with self._lock:
            others = len(self._scheduler.rows(call.lane)) - 1
            intact = len(self._runner.lengths(call.lane)) == others
            if intact:
                self._scheduler.withdraw(call.job)
        return (
            self._fail(call.lane, [call.job], error)
            if intact
            else self._lose_batch(call.lane, error)
        )

    def _lose_batch(self, lane: LaneKey, error: Exception) -> Deliveries:
        """A call on a whole batch threw: its caches may be in any state, so it ends here."""
        with self._lock:
            jobs = self._scheduler.rows(lane)
        deliveries = self._fail(lane, jobs, error)
        with self._lock:
            self._scheduler.abandon(lane)
        self._runner.abandon(lane)
        return deliveries

    def _end(self, job: Job[Work], event: Event, deliveries: Deliveries) -> None:
        if self._scheduler.end(job):
            deliveries.append((job.work.deliver, event))

    # What is measured.

    def _ran(
        self,
        lane: LaneKey,
        kind: Literal["classify", "prefill", "decode", "search"],
        begun_s: float,
        rows: int,
        evaluations: int | None = None,
    ) -> float:
        now_s = self._clock()
        self._times.observe((lane, kind), now_s - begun_s)
        self._metrics.call(lane, kind, rows, evaluations)
        return now_s

    def _observe_queue(self, job: Job[Work]) -> None:
        assert job.started_s is not None
        labels = job.lane.model, str(job.lane.steps)
        self._metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)

    def _observe_token(self, job: Job[Work], work: Generation, now_s: float) -> None:
        labels = job.lane.model, str(job.lane.steps)
        self._metrics.tokens.labels(job.lane.model).inc()
        if work.last_token_s is None:
            self._observe_queue(job)
            self._metrics.first_token_seconds.labels(*labels).observe(now_s - job.queued_s)
        else:
            self._metrics.inter_token_seconds.labels(*labels).observe(now_s - work.last_token_s)
        work.last_token_s = now_s

    def _observe_translation(self, job: Job[Work], event: Event, now_s: float) -> None:
        self._observe_queue(job)
        if isinstance(event, GeneratedEvent):
            labels = job.lane.model, str(job.lane.steps)
            self._metrics.tokens.labels(job.lane.model).inc(event.completion_tokens)
            self._metrics.first_token_seconds.labels(*labels).observe(now_s - job.queued_s)


def _as(kind: type[WorkT], job: Job[Work]) -> WorkT:
    assert isinstance(job.work, kind)
    return job.work


def _own(error: Exception) -> ServeError:
    """What a client is told when its own row could not be taken in."""
    if isinstance(error, ServeError):
        return error
    _log.error("a bug of ours: %s", error, exc_info=error)
    return InternalError("the answer could not be put together: this is our bug, please report it")


def _span(job: Job[Work], now_s: float) -> Span:
    assert job.started_s is not None
    return Span(job.queued_s, job.started_s, now_s)
