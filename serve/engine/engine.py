"""The engine: one thread that asks the scheduler for the next call, runs it, and delivers events.

Requests come in from any thread through `submit` and `cancel`; events go out through `post`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serve.bundle import LatencyEntry
from serve.catalog import Catalog, Served
from serve.engine.admission import Admission, Unread, too_large
from serve.engine.backlog import GenerationSize
from serve.engine.cost import CallTimes, LatencyModel
from serve.engine.execute import Executor, FailingModels, Rechecks, Runner
from serve.engine.job import Deadline, Job, LaneKey, Limits, State
from serve.engine.scheduler import Scheduler
from serve.engine.watchdog import AnyCall, EngineStallPolicy, StallLimits, Watchdog
from serve.engine.work import Deliveries, Work
from serve.errors import Draining, ModelGone, NotReady, ServeError, Stalled
from serve.metrics import Metrics

Post = Callable[..., Any]

_log = logging.getLogger("stepdial")


class EventSender:
    """Delivers events, on the engine's thread until it is told how to reach the event loop."""

    def __init__(self) -> None:
        self._post: Post = _deliver_here

    def call_with(self, post: Post) -> None:
        """From now on deliver through `post(function, *arguments)`."""
        self._post = post

    def send(self, deliveries: Deliveries) -> None:
        if not deliveries:
            return
        try:
            self._post(_deliver_all, deliveries)
        except RuntimeError:
            # The event loop is closed, and so are its requests.
            _log.warning("%d events came after the server had closed", len(deliveries))


def _deliver_all(deliveries: Deliveries) -> None:
    for deliver, event in deliveries:
        deliver(event)


def _deliver_here(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)


Soon = Callable[[Callable[[], None]], Any]


class EngineWaker:
    """Wakes the engine's thread, once for all requests of one turn of the event loop.

    Waking it for each request would take the interpreter from the loop each time.
    """

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._soon: Soon | None = None
        self._asked = False

    def call_with(self, soon: Soon) -> None:
        """From now on wake through `soon(function)`, which runs at the end of the loop's turn."""
        self._soon = soon

    def ask(self) -> None:
        """There is work to do."""
        if self._soon is None:
            self._wake()
        elif not self._asked:
            self._asked = True
            self._soon(self._wake)

    def _wake(self) -> None:
        self._asked = False
        with self._condition:
            self._condition.notify()


class PerModelState(Protocol):
    """A part of the engine that keeps something for each model."""

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone, by its key."""
        ...


class EngineModels:
    """The models that are served, and replaced ones that still have requests.

    A replaced or removed model gets no new requests. When its last user is gone, every part of the
    engine forgets it. Call with the engine's lock held.
    """

    def __init__(
        self,
        catalog: Catalog,
        runner: Runner,
        scheduler: Scheduler[Work],
        metrics: Metrics,
        others: Sequence[PerModelState],
    ) -> None:
        self._catalog = catalog
        self._runner = runner
        self._scheduler = scheduler
        self._metrics = metrics
        self._per_model: Sequence[PerModelState] = (runner, metrics, *others)
        self._leaving: list[Served] = []
        self._gone: list[Served] = []
        for served in catalog:
            metrics.serve(served.key, served.manifest)

    @property
    def leaving(self) -> tuple[Served, ...]:
        """Models that are no longer served and still have users."""
        return tuple(self._leaving)

    def check(self, jobs: Sequence[Job[Work]]) -> None:
        """ModelGone if a job's model is gone; Unprocessable if a job is too large."""
        for job in jobs:
            lane = job.lane
            if not self._runner.has_model(lane.model):
                raise ModelGone(f"{lane.name} was replaced meanwhile: send the request again")
            if lane.kind != "classify" and not self._scheduler.fits(lane, job.positions):
                raise too_large(job, self._runner.cache_bytes_for(lane, 1, job.positions))

    def serve(self, served: Served) -> None:
        """From now on requests go to this model instead of another of its name."""
        replaced = self._catalog.get(served.name)
        self._runner.add_model(served.key, served.model)
        self._metrics.serve(served.key, served.manifest)
        self._catalog.put(served)
        if replaced is not None:
            self._leave(replaced)

    def dismiss(self, served: Served) -> None:
        """No more requests go to this model."""
        self._catalog.remove(served.name)
        self._metrics.hide(served.name)
        self._leave(served)

    def release(self) -> bool:
        """Forget models that have no users left; True if there are any to close.

        On the engine's thread, between two calls.
        """
        for served in self._leaving[:]:
            if served.users.count == 0 and self._scheduler.close(served.key):
                self._leaving.remove(served)
                self._gone.append(served)
                for part in self._per_model:
                    part.drop_model(served.key)
        return bool(self._gone)

    def close_gone(self) -> None:
        """Close them on a thread of their own, since freeing memory takes a while."""
        if self._gone:
            gone, self._gone = self._gone, []
            threading.Thread(target=_close, args=(gone,), name="closing", daemon=True).start()

    def _leave(self, served: Served) -> None:
        self._leaving.append(served)


def _close(gone: Sequence[Served]) -> None:
    for served in gone:
        served.model.close()
        _log.info("%s, edition %d, has left", served.name, served.edition)


_IDLE_BEAT_S = 0.25
_REST_S = 0.02  # idle time before rechecks run
_STALL_LIMITS = StallLimits()


class Engine:
    """One thread that runs all models, and the interface to it for all other threads."""

    def __init__(
        self,
        catalog: Catalog,
        limits: Limits,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
        patience: StallLimits = _STALL_LIMITS,
        leave: Callable[[], None] = lambda: None,
        recheck_share: float = 0.0,
    ) -> None:
        """`leave` ends the process soon; called when a call hangs that cannot be ended.

        `recheck_share` is the share of early answers that are compared with those of all steps.
        """
        self.catalog = catalog
        self.metrics = metrics
        self.clock = clock
        self._runner = Runner({served.key: served.model for served in catalog})
        self.latency = LatencyModel()
        self._times = CallTimes()
        self._scheduler: Scheduler[Work] = Scheduler(
            limits,
            self._runner.cache_bytes_for,
            self._runner.most_lanes,
            self.latency,
            self._times.seconds,
            self._runner.sides,
        )
        self._admission = Admission(self._scheduler, self.latency, limits)
        self._wake = threading.Condition()
        self._waker = EngineWaker(self._wake)
        self._failing = FailingModels(clock)
        self._rechecks = Rechecks(recheck_share, self._runner.allowed_disagreement, metrics)
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
        policy = EngineStallPolicy(
            self._runner, self._times, self.latency, self._failing, metrics, self.abort, leave
        )
        self._watchdog: Watchdog[AnyCall] = Watchdog(policy, patience, clock)
        self._thread: threading.Thread | None = None
        self._sender = EventSender()
        self._draining_since_s: float | None = None
        self._closed = False
        self._stopping = False
        self._dead = False
        self.cache_bytes = 0
        others = (
            *(self.latency, self._times, self._failing),
            *(self._admission, self._executor, self._rechecks),
        )
        self._models = EngineModels(catalog, self._runner, self._scheduler, metrics, others)
        metrics.watch(self, limits.cache_bytes)

    # State, from any thread.

    @property
    def queued(self) -> int:
        """Requests that wait: for a model, or to be parsed."""
        return self._scheduler.queued + self.unread.waiting

    @property
    def running(self) -> int:
        """Requests that run: in a model, or while they are parsed."""
        return self._scheduler.running + self.unread.running

    @property
    def unread(self) -> Unread:
        """Requests that are still to be parsed before they come here."""
        return self._admission.unread

    @unread.setter
    def unread(self, unread: Unread) -> None:
        self._admission.unread = unread

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive() and not self._dead

    @property
    def dead(self) -> bool:
        """Whether the thread ended by a bug. It does not come back."""
        return self._dead

    @property
    def draining(self) -> bool:
        """Whether the process is about to end."""
        return self._draining_since_s is not None

    def takes(self, came_s: float) -> bool:
        """Whether work that arrived at this time is still taken while draining."""
        since_s = self._draining_since_s
        return since_s is None or came_s <= since_s

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the served models whose last call threw."""
        failing = self._failing.models
        return tuple(served.name for served in self.catalog if served.key in failing)

    @property
    def readiness(self) -> dict[str, bool]:
        """Whether new requests are welcome, by model."""
        try:
            self.check_open()
        except ServeError:
            return {served.name: False for served in self.catalog}
        failing = self.failing
        return {served.name: served.name not in failing for served in self.catalog}

    @property
    def leaving(self) -> tuple[Served, ...]:
        """Models that are no longer served but still have requests."""
        return self._models.leaving

    def check_open(self) -> None:
        """Raise unless new requests are taken."""
        if self.draining:
            raise Draining("the server is shutting down: send the request to another")
        self._check_works()

    def _check_works(self) -> None:
        if self._closed:
            raise Draining("the server is shutting down: send the request to another")
        if self._thread is None or self._dead:  # a thread that ends by itself sets _dead
            raise NotReady("the engine is not running: the server must be restarted")
        late_s = self._watchdog.late_s
        if late_s is not None:
            raise Stalled(
                f"one call of a model has taken {late_s:.1f} s: send the request to another "
                "server, or again later",
                retry_after_s=self._patience.stall_exit_s,
            )

    def predict_s(self, lane: LaneKey, measured: LatencyEntry | None) -> float | None:
        """The time of one call of this lane if it were asked for now, of the measured size."""
        with self._wake:
            return self._scheduler.backlog.answer_s(lane, measured)

    # Actions, from any thread.

    def start(self, post: Post | None = None, soon: Soon | None = None) -> None:
        """Start the thread; `post` and `soon` lead to an event loop."""
        assert self._thread is None, "an engine starts once"
        if post is not None:
            self._sender.call_with(post)
        if soon is not None:
            self._waker.call_with(soon)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, *jobs: Job[Work]) -> None:
        """Queue the jobs of a request: all, or none and it raises."""
        with self._wake:
            self._check_works()
            self._models.check(jobs)
            now_s = self.clock()
            self._admission.check(jobs, now_s)
            for job in jobs:
                self._scheduler.add(job, now_s)
                if job.deadline is not None:
                    self.metrics.deadlines.labels(job.lane.name).inc()
        self._waker.ask()

    def check_unread(self, wait_s: float, deadline: Deadline | None) -> None:
        """Raise if a request has no place in the queue or no time to be parsed: see Admission."""
        with self._wake:
            self._admission.check_unread(wait_s, deadline, self.clock())

    def check_early(self, key: LaneKey, least: int, most: tuple[int, ...], given: Deadline) -> None:
        """Raise if a classification has no time whatever its text: see Admission."""
        with self._wake:
            self._check_works()
            self._admission.check_early(key, least, most, given, self.clock())

    def steps_for(
        self, key: LaneKey, choices: Sequence[int], size: GenerationSize, deadline: Deadline | None
    ) -> int:
        """Of the choices, the steps for generations that come now; raises if none is in time."""
        with self._wake:
            return self._admission.steps_for(key, choices, size, deadline, self.clock())

    def lapse(self, *jobs: Job[Work]) -> None:
        """The deadline of these jobs has passed: end them now, or at their next token."""
        with self._wake:
            deliveries = self._executor.lapse(jobs)
            self._wake.notify()
        self._sender.send(deliveries)

    def cancel(self, job: Job[Work]) -> bool:
        """The client has disconnected: drop the job now, or at its next token. No event is sent.

        False if it had ended.
        """
        if job.state is State.ENDED:  # most have: no need to wait for the lock
            return False
        with self._wake:
            if not self._scheduler.end(job):
                return False
            self.metrics.cancelled.inc()
            self._wake.notify()
        return True

    def serve(self, served: Served) -> None:
        """A warm model takes requests, instead of another of its name if there is one."""
        with self._wake:
            self._models.serve(served)
            self._wake.notify()

    def dismiss(self, served: Served) -> None:
        """A model takes no more requests; those it has go on."""
        with self._wake:
            self._models.dismiss(served)
            self._wake.notify()

    def drain(self) -> None:
        """The process is about to end: requests from before go on, and are taken until `close`.

        Later requests are to be refused: see `takes`.
        """
        if self._draining_since_s is None:  # without the lock, for signal handlers
            self._draining_since_s = self.clock()

    def close(self, error: ServeError) -> None:
        """Take no more work, and end all requests with this error."""
        self.drain()
        with self._wake:
            self._closed = True
        self.abort(error)

    def abort(self, error: ServeError) -> None:
        """End all requests with this error."""
        with self._wake:
            deliveries = self._executor.end_all(error)
            self._wake.notify()
        self._sender.send(deliveries)

    def stop(self) -> None:
        """End the thread after the running call. Requests that are left get an error."""
        self.drain()
        with self._wake:
            self._closed = self._stopping = True
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
                self._sender.send(lapsed)
                self._models.close_gone()
                if call is not None:
                    self._watchdog.begin(call)
                    deliveries = self._executor.execute(call)
                    self._watchdog.end()
                    self.cache_bytes = self._runner.cache_bytes
                    self._sender.send(deliveries)
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
            self._sender.send(deliveries)

    def _next_call(self) -> tuple[AnyCall | None, Deliveries]:
        """The next call, and events for jobs whose deadline cannot be met."""
        with self._wake:
            rested_s = self.clock() + _REST_S
            while not self._stopping:
                if self._models.release():
                    return None, []
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
