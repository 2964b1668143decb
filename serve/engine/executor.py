"""Carries out the scheduler's calls: runs the model, takes the results in, ends what is over.

Used by the engine's thread alone, and takes the engine's lock only while it touches the scheduler.
It deliberately knows neither when to run nor who is told: it returns the events that came of it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from serve.engine.classification import Classification, labelled_rows
from serve.engine.ending import Ending, own, span
from serve.engine.events import Event, FailedEvent, GeneratedEvent, TokenEvent
from serve.engine.failing import CheckCall, Failing
from serve.engine.pace import CallTimes
from serve.engine.rechecks import RecheckCall, Rechecks
from serve.engine.runner import Runner
from serve.engine.translation import Translation
from serve.engine.work import Deliveries, Work, work_as
from serve.engine.writing import Writing
from serve.errors import DeadlineLapsed, ModelFailure, ServeError
from serve.metrics import Metrics
from serve.runtime.protocol import FloatArray, Row
from serve.scheduler.job import (
    Call,
    CallKind,
    ClassifyCall,
    DecodeCall,
    Job,
    LaneKey,
    PrefillCall,
    SearchCall,
)
from serve.scheduler.latency_model import LatencyModel, Series
from serve.scheduler.scheduler import Scheduler


class Executor:
    """The part of the engine that runs models."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        runner: Runner,
        lock: threading.Condition,
        times: CallTimes,
        latency: LatencyModel,
        failing: Failing,
        rechecks: Rechecks,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._times = times
        self._latency = latency
        self._rechecks = rechecks
        self._metrics = metrics
        self._clock = clock
        self._ending = Ending(scheduler, lock, failing, metrics)
        self._writing = Writing(
            scheduler, runner, lock, self._ending, times, latency, metrics, clock
        )

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._writing.drop_model(model)

    def execute(self, call: Call[Work] | CheckCall | RecheckCall) -> Deliveries:
        """Run one call to its end; whatever the runtime throws ends the requests in it only."""
        match call:
            case ClassifyCall():
                return self._classify(call)
            case SearchCall():
                return self._search(call)
            case PrefillCall():
                return self._writing.prefill(call)
            case DecodeCall():
                return self._writing.decode(call)
            case CheckCall():
                return self._check(call.lane)
            case RecheckCall():
                return self._recheck(call)

    def end_all(self, error: ServeError) -> Deliveries:
        """End every job there is. The caller holds the lock."""
        return self._ending.end_all(error)

    def lapse(self, jobs: Iterable[Job[Work]]) -> Deliveries:
        """End jobs whose deadline has passed or cannot be met. The caller holds the lock."""
        return self._ending.lapse(jobs)

    def _classify(self, call: ClassifyCall[Work]) -> Deliveries:
        begun_s = self._clock()
        rows = [(job, work_as(Classification, job), row) for job, row in call.rows]
        rung = call.rung
        try:
            found = self._runner.classify(rung, [work.rows[row] for _, work, row in rows])
            answers = labelled_rows(found, [work.rows[row] for _, work, row in rows])
        except Exception as error:
            return self._ending.fail(rung, [job for job, _ in call.rows], error)
        self._ending.ran(rung)
        spent: list[int] = found.evaluations.tolist()
        now_s = self._clock()
        self._metrics.call(rung, "classify", len(rows), sum(spent))
        failures: dict[Job[Work], ServeError] = {}
        for (job, work, row), one, count in zip(rows, answers, spent, strict=True):
            if isinstance(one, ModelFailure):
                failures[job] = one
            else:
                work.accept(row, one, call.steps, count)
        if rung.threshold is not None:
            self._offer(rung, [work.rows[row] for _, work, row in rows], found.logits, spent)
        deliveries: Deliveries = []
        with self._lock:
            for job, failure in failures.items():
                self._ending.end(job, FailedEvent(failure), deliveries)
            for job, work, _ in rows:
                if self._scheduler.row_done(job):
                    self._observe_queue(job, rung.steps)
                    deliveries.append((work.deliver, self._classified(job, work, now_s)))
        # With what follows the call: the next one waits for that too.
        spent_s = self._clock() - begun_s
        self._times.observe((call.lane, "classify"), spent_s)
        if not rung.traced:  # which reads out more often
            series = Series(rung.model, "classify", rung.steps, rung.threshold)
            self._latency.observe(series, len(rows), call.length, spent_s)
        return deliveries

    def _classified(self, job: Job[Work], work: Classification, now_s: float) -> Event:
        if job.deadline is not None and now_s > job.deadline.ends_s:
            self._metrics.lapsed.labels(job.lane.name).inc()
            return FailedEvent(DeadlineLapsed(job.deadline.given_s))
        return work.finished(span(job, now_s))

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
        work = work_as(Translation, job)
        prefixes = work.prefixes  # (B, N)
        try:
            logits = self._runner.search(lane, job.number, work.wish.prompt, prefixes)  # (B, V)
        except Exception as error:
            return self._ending.fail(lane, [job], error)
        now_s = self._ran(lane, "search", begun_s, len(prefixes))
        deliveries: Deliveries = []
        try:
            work.accept(logits)
            events: tuple[Event, ...] = work.finished(span(job, now_s)) if work.over else ()
        except Exception as error:
            events = (FailedEvent(own(error, job)),)
        with self._lock:
            job.tokens_left -= 1
            if events and self._scheduler.end(job):
                self._observe_translation(job, events[-1], now_s)
                deliveries = [
                    (work.deliver, event)
                    for event in events
                    if work.wish.stream or not isinstance(event, TokenEvent)
                ]
        # With what follows the call: the next one waits for that too.
        self._observe_step(lane, job, prefixes.shape, self._clock() - begun_s)
        return deliveries

    def _check(self, lane: LaneKey) -> Deliveries:
        try:
            self._runner.check(lane)
        except Exception as error:
            return self._ending.fail(lane, [], error)
        self._ending.ran(lane)
        return []

    def _offer(
        self, rung: LaneKey, rows: Sequence[Row], logits: FloatArray, spent: Sequence[int]
    ) -> None:
        """Answers that may be compared with those of all steps."""
        full = self._runner.full_evaluations(rung)
        for row, row_logits, count in zip(rows, logits, spent, strict=True):
            self._rechecks.offer(rung, row, row_logits, early=count < full)

    def _recheck(self, call: RecheckCall) -> Deliveries:
        try:
            found = self._runner.classify(call.lane, [call.row])
        except Exception as error:
            return self._ending.fail(call.lane, [], error)
        self._ending.ran(call.lane)
        self._metrics.call(call.lane, "recheck", 1, None)
        self._rechecks.found(call, found.logits[0])
        return []

    # What is measured.

    def _ran(
        self,
        lane: LaneKey,
        kind: CallKind,
        begun_s: float,
        rows: int,
        evaluations: int | None = None,
    ) -> float:
        now_s = self._clock()
        self._times.observe((lane, kind), now_s - begun_s)
        self._metrics.call(lane, kind, rows, evaluations)
        self._ending.ran(lane)
        return now_s

    def _observe_step(
        self, lane: LaneKey, job: Job[Work], shape: tuple[int, ...], seconds: float
    ) -> None:
        rows, length = shape
        kind: CallKind = "search"
        if length == 1:  # the source was read as well, which takes longer
            kind, length = "prefill", job.lengths[0]
        self._latency.observe(Series(lane.model, kind, lane.steps), rows, length, seconds)

    def _observe_queue(self, job: Job[Work], steps: int) -> None:
        assert job.started_s is not None
        labels = job.lane.name, str(steps)
        self._metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)

    def _observe_translation(self, job: Job[Work], event: Event, now_s: float) -> None:
        self._observe_queue(job, job.lane.steps)
        if isinstance(event, GeneratedEvent):
            labels = job.lane.name, str(job.lane.steps)
            self._metrics.tokens.labels(job.lane.name).inc(event.completion_tokens)
            self._metrics.first_token_seconds.labels(*labels).observe(now_s - job.queued_s)
