"""The engine: one thread that asks the scheduler what is next, runs it, and tells the callers.

Requests come in from any thread through `submit` and `cancel`; events go out through `post`. It
deliberately knows no HTTP and no asyncio: `post` is where an event loop may be plugged in.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from serve.catalog import Catalog
from serve.errors import Draining, NotReady, QueueFull, ServeError, Unprocessable
from serve.events import TokenEvent
from serve.executor import Deliveries, Executor, Work
from serve.job import Call, Job, LaneKey
from serve.metrics import Metrics
from serve.pace import CallTimes, ServiceRate
from serve.runner import Runner
from serve.scheduler import Limits, Scheduler

Post = Callable[..., Any]

_IDLE_BEAT_S = 0.25
_log = logging.getLogger("stepdial")


class Engine:
    """Everything that runs, on one thread."""

    def __init__(
        self,
        catalog: Catalog,
        limits: Limits,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.catalog = catalog
        self.metrics = metrics
        self.clock = clock
        self._runner = Runner(catalog.models)
        self._scheduler: Scheduler[Work] = Scheduler(limits, self._runner.cache_bytes_for)
        self._rate = ServiceRate()
        self._times = CallTimes()
        self._wake = threading.Condition()
        self._executor = Executor(
            self._scheduler, self._runner, self._wake, self._times, metrics, clock
        )
        self._thread: threading.Thread | None = None
        self._post: Post = _deliver_here
        self._beat_s = clock()
        self._draining = False
        self._stopping = False
        self._dead = False
        self.cache_bytes = 0
        metrics.serve(served.manifest for served in catalog)
        metrics.watch(self, limits.cache_bytes)

    # What others see, from any thread.

    @property
    def queued(self) -> int:
        return self._scheduler.queued

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive() and not self._dead

    @property
    def dead(self) -> bool:
        """Whether the thread ended by a bug: it never comes back."""
        return self._dead

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def beat_age_s(self) -> float:
        """How long ago the engine last came round: large while a call hangs."""
        return self.clock() - self._beat_s

    def predict_s(self, lane: LaneKey, measured_s: float | None) -> float | None:
        """How long one call of this lane would take, asked for now."""
        with self._wake:
            busy = self._scheduler.busy_turns()
            ahead = self._scheduler.calls_ahead(lane)
            return self._times.predict_s(lane, busy, ahead, measured_s)

    # What others do, from any thread.

    def start(self, post: Post | None = None) -> None:
        """Start the thread; `post(function, *arguments)` carries events to where they are read."""
        assert self._thread is None, "an engine starts once"
        self._post = post or _deliver_here
        self._beat_s = self.clock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job[Work]) -> None:
        """Queue a job; raises if there is no place for it, now or ever."""
        with self._wake:
            if self._draining:
                raise Draining("the server is shutting down: send the request to another")
            if not self.alive:
                raise NotReady("the engine is not running: the server must be restarted")
            if job.lane.kind != "classify" and not self._scheduler.fits(job.lane, job.positions):
                raise self._too_large(job)
            if self._scheduler.full:
                queued = self._scheduler.queued
                raise QueueFull(
                    f"the queue is full ({queued} requests): try again later",
                    retry_after_s=self._rate.wait_s(queued),
                )
            self._scheduler.add(job, self.clock())
            self._wake.notify()

    def cancel(self, job: Job[Work]) -> None:
        """Whoever asked has gone: drop the job now, or at its next token. Nobody is told."""
        with self._wake:
            if self._scheduler.end(job):
                self.metrics.cancelled.inc()
                self._wake.notify()

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self._draining = True  # without the lock: a signal handler may call this

    def abort(self, error: ServeError) -> None:
        """End every request with this error."""
        with self._wake:
            deliveries = self._executor.end_all(error)
            self._wake.notify()
        self._send(deliveries)

    def stop(self) -> None:
        """End the thread after the call that is running. Requests that are left get an error."""
        with self._wake:
            self._draining = self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self.abort(Draining("the server is shutting down: send the request to another"))

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                call = self._next_call()
                if call is None:
                    return
                begun_s = self.clock()
                deliveries = self._executor.execute(call)
                self.cache_bytes = self._runner.cache_bytes
                ended = sum(1 for _, event in deliveries if not isinstance(event, TokenEvent))
                self._rate.busy(self.clock() - begun_s, ended)
                self._send(deliveries)
        except BaseException:
            _log.exception("the engine stopped; restart the server")
            with self._wake:
                self._dead = True
                deliveries = self._executor.end_all(
                    NotReady("the engine has stopped: the server must be restarted")
                )
            self._send(deliveries)

    def _next_call(self) -> Call[Work] | None:
        with self._wake:
            while not self._stopping:
                now_s = self._beat_s = self.clock()
                call = self._scheduler.next(now_s)
                if call is not None:
                    return call
                wake_s = self._scheduler.wake_s()
                wait_s = _IDLE_BEAT_S if wake_s is None else max(0.0, wake_s - now_s)
                self._wake.wait(min(wait_s, _IDLE_BEAT_S))
            return None

    def _too_large(self, job: Job[Work]) -> Unprocessable:
        needed = self._runner.cache_bytes_for(job.lane, 1, job.positions)
        return Unprocessable(
            f"the prompt and max_tokens need {needed / 2**20:.1f} MiB of cache at "
            f"{job.lane.steps} steps, more than this server has: lower max_tokens or steps",
            param="max_tokens",
        )

    def _send(self, deliveries: Deliveries) -> None:
        if not deliveries:
            return
        try:
            self._post(_deliver_all, deliveries)
        except RuntimeError:
            # The event loop has closed: whoever was waiting has gone with it.
            _log.warning("%d events came after the server had closed", len(deliveries))


def _deliver_all(deliveries: Deliveries) -> None:
    for deliver, event in deliveries:
        deliver(event)


def _deliver_here(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)
