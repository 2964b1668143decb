"""The engine: one thread that asks the scheduler what is next, runs it, and tells the callers.

Requests come in from any thread through `submit` and `cancel`; events go out through `post`. It
deliberately knows no HTTP and no asyncio: `post` is where an event loop may be plugged in.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from serve.catalog import Catalog
from serve.engine.admission import Admission
from serve.engine.executor import Executor
from serve.engine.failing import Failing
from serve.engine.pace import CallTimes
from serve.engine.rechecks import Rechecks
from serve.engine.rescue import AnyCall, Rescue
from serve.engine.runner import Runner
from serve.engine.watchdog import Patience, Watchdog
from serve.engine.work import Deliveries, Work
from serve.errors import Draining, NotReady, ServeError, Stalled, Unprocessable
from serve.metrics import Metrics
from serve.scheduler.job import Deadline, Job, LaneKey
from serve.scheduler.latency_model import LatencyModel
from serve.scheduler.limits import Limits
from serve.scheduler.scheduler import Scheduler

Post = Callable[..., Any]

_IDLE_BEAT_S = 0.25
_REST_S = 0.02  # after the last call, before there is time to spare
_PATIENCE = Patience()
_log = logging.getLogger("stepdial")


class Engine:
    """Everything that runs, on one thread."""

    def __init__(
        self,
        catalog: Catalog,
        limits: Limits,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
        patience: Patience = _PATIENCE,
        leave: Callable[[], None] = lambda: None,
        recheck_share: float = 0.0,
    ) -> None:
        """`leave` is to end the process soon: a call hangs that cannot be ended.

        `recheck_share` is how many early answers are compared with those of all steps.
        """
        self.catalog = catalog
        self.metrics = metrics
        self.clock = clock
        self._runner = Runner(catalog.models)
        self.latency = LatencyModel()
        self._times = CallTimes()
        self._scheduler: Scheduler[Work] = Scheduler(
            limits,
            self._runner.cache_bytes_for,
            self._runner.most_lanes,
            self.latency,
            self._times.seconds,
        )
        self._admission = Admission(self._scheduler, self.latency, limits)
        self._wake = threading.Condition()
        self._failing = Failing(clock)
        self._rechecks = Rechecks(recheck_share, self._runner.promise, metrics)
        self._executor = Executor(
            self._scheduler,
            self._runner,
            self._wake,
            self._times,
            self.latency,
            self._failing,
            self._rechecks,
            metrics,
            clock,
        )
        self._patience = patience
        rescue = Rescue(
            self._runner,
            self._times,
            self.latency,
            self._failing,
            metrics,
            self.abort,
            leave,
        )
        self._watchdog: Watchdog[AnyCall] = Watchdog(rescue, patience, clock)
        self._thread: threading.Thread | None = None
        self._post: Post = _deliver_here
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
    def failing(self) -> tuple[str, ...]:
        """The models whose last call threw."""
        return self._failing.models

    def check_open(self) -> None:
        """Raises unless requests are taken."""
        if self._draining:
            raise Draining("the server is shutting down: send the request to another")
        if not self.alive:
            raise NotReady("the engine is not running: the server must be restarted")
        late_s = self._watchdog.late_s
        if late_s is not None:
            raise Stalled(
                f"one call of a model has taken {late_s:.1f} s: send the request to another "
                "server, or again later",
                retry_after_s=self._patience.stall_exit_s,
            )

    def predict_s(self, lane: LaneKey, measured_s: float | None) -> float | None:
        """How long one call of this lane would take, asked for now."""
        with self._wake:
            busy = self._scheduler.busy_turns()
            ahead = self._scheduler.prospects.calls_ahead(lane)
            return self._times.predict_s(lane, busy, ahead, measured_s)

    # What others do, from any thread.

    def start(self, post: Post | None = None) -> None:
        """Start the thread; `post(function, *arguments)` carries events to where they are read."""
        assert self._thread is None, "an engine starts once"
        self._post = post or _deliver_here
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, job: Job[Work]) -> None:
        """Queue a job; raises if there is no place for it, now or ever."""
        with self._wake:
            self.check_open()
            if job.lane.kind != "classify" and not self._scheduler.fits(job.lane, job.positions):
                raise self._too_large(job)
            now_s = self.clock()
            self._admission.check(job, now_s)
            self._scheduler.add(job, now_s)
            self._wake.notify()

    def steps_for(
        self,
        key: LaneKey,
        choices: Sequence[int],
        prompt: int,
        tokens: int,
        deadline: Deadline | None,
    ) -> int:
        """Of the choices, the steps for a generation that comes now; raises if none is in time."""
        with self._wake:
            return self._admission.steps_for(key, choices, prompt, tokens, deadline, self.clock())

    def lapse(self, job: Job[Work]) -> None:
        """The deadline of a job has passed: end it now, or at its next token."""
        with self._wake:
            deliveries = self._executor.lapse([job])
            self._wake.notify()
        self._send(deliveries)

    def cancel(self, job: Job[Work]) -> bool:
        """Whoever asked has gone: drop the job now, or at its next token. Nobody is told.

        False if it had ended.
        """
        with self._wake:
            ends = self._scheduler.end(job)
            if ends:
                self.metrics.cancelled.inc()
                self._wake.notify()
        return ends

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
        self._watchdog.stop()
        self.abort(Draining("the server is shutting down: send the request to another"))

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                call, lapsed = self._next_call()
                self._send(lapsed)
                if call is not None:
                    self._watchdog.begin(call)
                    deliveries = self._executor.execute(call)
                    self._watchdog.end()
                    self.cache_bytes = self._runner.cache_bytes
                    self._send(deliveries)
                elif self._stopping:
                    return
        except BaseException:
            self._watchdog.end()
            _log.exception("the engine stopped; restart the server")
            with self._wake:
                self._dead = True
                deliveries = self._executor.end_all(
                    NotReady("the engine has stopped: the server must be restarted")
                )
            self._send(deliveries)

    def _next_call(self) -> tuple[AnyCall | None, Deliveries]:
        """What to run, and what to tell those whose deadline cannot be met."""
        with self._wake:
            rested_s = self.clock() + _REST_S
            while not self._stopping:
                now_s = self.clock()
                lapsed = self._executor.lapse(self._scheduler.lapsed(now_s))
                call = self._scheduler.next(now_s)
                if call is not None or lapsed:
                    return call, lapsed
                check = self._failing.due(now_s)
                if check is not None:
                    return check, []
                wake_s = self._scheduler.wake_s()
                if wake_s is None and self._rechecks.waiting:
                    if now_s >= rested_s:
                        return self._rechecks.take(), []
                    wake_s = rested_s
                wait_s = _IDLE_BEAT_S if wake_s is None else max(0.0, wake_s - now_s)
                self._wake.wait(min(wait_s, _IDLE_BEAT_S))
            return None, []

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
