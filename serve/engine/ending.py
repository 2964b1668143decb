"""Ends jobs, each once, and says why: with an answer, or with the error of whatever went wrong.

Used by the engine's thread. It deliberately knows neither calls nor what a job computes.
"""

import logging
import threading
from collections.abc import Iterable

from serve.bundle import steps_in_words
from serve.engine.events import Event, FailedEvent, Span
from serve.engine.failing import Failing
from serve.engine.generation import Generation
from serve.engine.work import Deliveries, Work
from serve.errors import DeadlineLapsed, InternalError, ModelFailure, OutOfMemory, ServeError
from serve.metrics import Metrics
from serve.scheduler.job import Job, LaneKey
from serve.scheduler.scheduler import Scheduler

_log = logging.getLogger("stepdial")


class Ending:
    """The last events of jobs."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        lock: threading.Condition,
        failing: Failing,
        metrics: Metrics,
    ) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._failing = failing
        self._metrics = metrics

    def end(self, job: Job[Work], event: Event, deliveries: Deliveries) -> None:
        """The job is over with this event, unless it was before. The caller holds the lock."""
        if self._scheduler.end(job):
            deliveries.append((job.work.deliver, event))

    def end_all(self, error: ServeError) -> Deliveries:
        """End every job there is. The caller holds the lock."""
        deliveries: Deliveries = []
        for job in self._scheduler.jobs():
            self.end(job, FailedEvent(error), deliveries)
        return deliveries

    def lapse(self, jobs: Iterable[Job[Work]]) -> Deliveries:
        """The deadline of these jobs has passed, or cannot be met. The caller holds the lock."""
        deliveries: Deliveries = []
        for job in jobs:
            assert job.deadline is not None
            text = job.work.text if isinstance(job.work, Generation) else None
            if self._scheduler.end(job):
                self._metrics.lapsed.labels(job.lane.name).inc()
                error = DeadlineLapsed(job.deadline.given_s, text)
                deliveries.append((job.work.deliver, FailedEvent(error)))
        return deliveries

    def ran(self, lane: LaneKey) -> None:
        """A call of the runtime succeeded."""
        self._failing.worked(lane)

    def fail(self, lane: LaneKey, jobs: Iterable[Job[Work]], error: Exception) -> Deliveries:
        """A call of the runtime threw: the jobs in it end."""
        jobs = list(jobs)
        ids = request_ids(jobs)
        _log.error(
            "%s failed at %d steps%s: %s",
            *(lane.name, lane.steps, in_requests(ids), error),
            exc_info=error,
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        self._metrics.runtime_failures.labels(lane.name).inc()
        self._failing.threw(lane)
        failure = ModelFailure(
            f"{lane.name} failed at {steps_in_words(lane.steps)}: try again, or with other steps"
        )
        deliveries: Deliveries = []
        with self._lock:
            for job in jobs:
                self.end(job, FailedEvent(failure), deliveries)
        return deliveries


def own(error: Exception, job: Job[Work]) -> ServeError:
    """What a client is told when its own row could not be taken in."""
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


def request_ids(jobs: Iterable[Job[Work]]) -> list[str]:
    """The ids of the requests that these jobs are of, each once."""
    return list(dict.fromkeys(job.request_id for job in jobs if job.request_id))


def in_requests(ids: list[str]) -> str:
    """The part of a sentence that names them."""
    return f" in request {', '.join(ids)}" if ids else ""


def span(job: Job[Work], now_s: float) -> Span:
    """When the job waited and ran."""
    assert job.started_s is not None
    return Span(job.queued_s, job.started_s, now_s)
