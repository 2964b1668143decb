"""The engine: one thread that asks the scheduler what is next, runs it, and tells the callers.

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
from serve.engine.cost import CallTimes, LatencyModel
from serve.engine.execute import Executor, Failing, Rechecks, Runner
from serve.engine.job import Deadline, Job, LaneKey, Limits, State
from serve.engine.predict import Asked
from serve.engine.scheduler import Scheduler
from serve.engine.watchdog import AnyCall, Patience, Rescue, Watchdog
from serve.engine.work import Deliveries, Work
from serve.errors import Draining, ModelGone, NotReady, ServeError, Stalled
from serve.metrics import Metrics

# Carries events from the engine's thread to where they are read.


Post = Callable[..., Any]

_log = logging.getLogger("stepdial")


class Posting:
    """Delivers at once, on the thread that sends, until it is told another way."""

    def __init__(self) -> None:
        self._post: Post = _deliver_here

    def through(self, post: Post) -> None:
        """From now on `post(function, *arguments)` takes events to where they are read."""
        self._post = post

    def send(self, deliveries: Deliveries) -> None:
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


# Wakes the engine's thread once for all the requests that come in one turn of an event loop. A
# thread that is woken for each of them takes the interpreter from the loop for each, and finds
# them one by one.


Soon = Callable[[Callable[[], None]], Any]


class Waking:
    """Wakes at once, until it is told what runs things at the end of a turn."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._soon: Soon | None = None
        self._asked = False

    def through(self, soon: Soon) -> None:
        """From now on `soon(function)` wakes, and is called only where requests are submitted."""
        self._soon = soon

    def ask(self) -> None:
        """There is something to do."""
        if self._soon is None:
            self._wake()
        elif not self._asked:
            self._asked = True
            self._soon(self._wake)

    def _wake(self) -> None:
        self._asked = False
        with self._condition:
            self._condition.notify()


# The models in the engine: those that are served, and those that leave when their last guest
# does. A model that has been replaced or taken away gets no new requests; it stays until nothing
# of it is left, and then every part of the engine forgets it. Used with the engine's lock held.


class Forgetful(Protocol):
    """A part that keeps something of each model."""

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone, by its key."""
        ...


class Residents:
    """Changes the catalog, and clears up behind it."""

    def __init__(
        self,
        catalog: Catalog,
        runner: Runner,
        scheduler: Scheduler[Work],
        metrics: Metrics,
        others: Sequence[Forgetful],
    ) -> None:
        self._catalog = catalog
        self._runner = runner
        self._scheduler = scheduler
        self._metrics = metrics
        self._forgetful: Sequence[Forgetful] = (runner, metrics, *others)
        self._leaving: list[Served] = []
        self._gone: list[Served] = []
        for served in catalog:
            metrics.serve(served.key, served.manifest)

    @property
    def leaving(self) -> tuple[Served, ...]:
        """Models that are served no more, and still have users."""
        return tuple(self._leaving)

    def check(self, jobs: Sequence[Job[Work]]) -> None:
        """ModelGone unless all are for models that are here; Unprocessable if one is too large."""
        for job in jobs:
            lane = job.lane
            if not self._runner.has_model(lane.model):
                raise ModelGone(f"{lane.name} was replaced meanwhile: send the request again")
            if lane.kind != "classify" and not self._scheduler.fits(lane, job.positions):
                raise too_large(job, self._runner.cache_bytes_for(lane, 1, job.positions))

    def enter(self, served: Served) -> None:
        """From now on requests go to this model, not to another of its name."""
        replaced = self._catalog.get(served.name)
        self._runner.add_model(served.key, served.model)
        self._metrics.serve(served.key, served.manifest)
        self._catalog.put(served)
        if replaced is not None:
            self._leave(replaced)

    def dismiss(self, served: Served) -> None:
        """No request goes to this model any more."""
        self._catalog.remove(served.name)
        self._metrics.hide(served.name)
        self._leave(served)

    def release(self) -> bool:
        """Forget those that have no users any more, and are to be closed; whether there are any.

        On the engine's thread, between two calls.
        """
        for served in self._leaving[:]:
            if served.users.count == 0 and self._scheduler.close(served.key):
                self._leaving.remove(served)
                self._gone.append(served)
                for part in self._forgetful:
                    part.drop_model(served.key)
        return bool(self._gone)

    def close_gone(self) -> None:
        """Free the memory of those, which takes a while: aside, so that others are answered."""
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
_REST_S = 0.02  # after the last call, before there is time to spare
_PATIENCE = Patience()


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
        self._waking = Waking(self._wake)
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
            self._runner, self._times, self.latency, self._failing, metrics, self.abort, leave
        )
        self._watchdog: Watchdog[AnyCall] = Watchdog(rescue, patience, clock)
        self._thread: threading.Thread | None = None
        self._posting = Posting()
        self._draining_since_s: float | None = None
        self._closed = False
        self._stopping = False
        self._dead = False
        self.cache_bytes = 0
        others = (
            *(self.latency, self._times, self._failing),
            *(self._admission, self._executor, self._rechecks),
        )
        self._residents = Residents(catalog, self._runner, self._scheduler, metrics, others)
        metrics.watch(self, limits.cache_bytes)

    # What others see, from any thread.

    @property
    def queued(self) -> int:
        """Requests that wait: for a model, or to be read."""
        return self._scheduler.queued + self.unread.waiting

    @property
    def running(self) -> int:
        """Requests that run: in a model, or while they are read."""
        return self._scheduler.running + self.unread.running

    @property
    def unread(self) -> Unread:
        """Requests that have yet to be read before they come here."""
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
        """Whether the thread ended by a bug: it never comes back."""
        return self._dead

    @property
    def draining(self) -> bool:
        """Whether the process is about to end."""
        return self._draining_since_s is not None

    def takes(self, came_s: float) -> bool:
        """Whether work that came at this time is taken in, though the process may be ending."""
        since_s = self._draining_since_s
        return since_s is None or came_s <= since_s

    @property
    def failing(self) -> tuple[str, ...]:
        """The models whose last call threw; those that leave concern nobody any more."""
        failing = self._failing.models
        return tuple(served.name for served in self.catalog if served.key in failing)

    @property
    def readiness(self) -> dict[str, bool]:
        """Whether requests are welcome that come now, by model."""
        try:
            self.check_open()
        except ServeError:
            return {served.name: False for served in self.catalog}
        failing = self.failing
        return {served.name: served.name not in failing for served in self.catalog}

    @property
    def leaving(self) -> tuple[Served, ...]:
        """Models that are served no more, but still have requests."""
        return self._residents.leaving

    def check_open(self) -> None:
        """Raises unless requests that come now are taken."""
        if self.draining:
            raise Draining("the server is shutting down: send the request to another")
        self._check_works()

    def _check_works(self) -> None:
        if self._closed:
            raise Draining("the server is shutting down: send the request to another")
        if self._thread is None or self._dead:  # a thread that ends by itself says so
            raise NotReady("the engine is not running: the server must be restarted")
        late_s = self._watchdog.late_s
        if late_s is not None:
            raise Stalled(
                f"one call of a model has taken {late_s:.1f} s: send the request to another "
                "server, or again later",
                retry_after_s=self._patience.stall_exit_s,
            )

    def predict_s(self, lane: LaneKey, measured: LatencyEntry | None) -> float | None:
        """How long one call of this lane would take, asked for now, of the size measured."""
        with self._wake:
            return self._scheduler.prospects.answer_s(lane, measured)

    # What others do, from any thread.

    def start(self, post: Post | None = None, soon: Soon | None = None) -> None:
        """Start the thread; `post` and `soon` lead to an event loop: see Posting and Waking."""
        assert self._thread is None, "an engine starts once"
        if post is not None:
            self._posting.through(post)
        if soon is not None:
            self._waking.through(soon)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, *jobs: Job[Work]) -> None:
        """Queue the jobs of a request: all, or none and it raises."""
        with self._wake:
            self._check_works()
            self._residents.check(jobs)
            now_s = self.clock()
            self._admission.check(jobs, now_s)
            for job in jobs:
                self._scheduler.add(job, now_s)
                if job.deadline is not None:
                    self.metrics.deadlines.labels(job.lane.name).inc()
        self._waking.ask()

    def check_unread(self, wait_s: float, deadline: Deadline | None) -> None:
        """Raise if there is no place or no time for a request to be read: see Admission."""
        with self._wake:
            self._admission.check_unread(wait_s, deadline, self.clock())

    def check_early(self, key: LaneKey, least: int, most: tuple[int, ...], given: Deadline) -> None:
        """Raise if there is no time for a classification, whatever it says: see Admission."""
        with self._wake:
            self._check_works()
            self._admission.check_early(key, least, most, given, self.clock())

    def steps_for(
        self, key: LaneKey, choices: Sequence[int], asked: Asked, deadline: Deadline | None
    ) -> int:
        """Of the choices, the steps for generations that come now; raises if none is in time."""
        with self._wake:
            return self._admission.steps_for(key, choices, asked, deadline, self.clock())

    def lapse(self, *jobs: Job[Work]) -> None:
        """The deadline of these jobs has passed: end them now, or at their next token."""
        with self._wake:
            deliveries = self._executor.lapse(jobs)
            self._wake.notify()
        self._posting.send(deliveries)

    def cancel(self, job: Job[Work]) -> bool:
        """Whoever asked has gone: drop the job now, or at its next token. Nobody is told.

        False if it had ended.
        """
        if job.state is State.ENDED:  # as most have: it need not wait for the lock
            return False
        with self._wake:
            if not self._scheduler.end(job):
                return False
            self.metrics.cancelled.inc()
            self._wake.notify()
        return True

    def serve(self, served: Served) -> None:
        """A warm model takes requests, in the place of another of its name if there is one."""
        with self._wake:
            self._residents.enter(served)
            self._wake.notify()

    def dismiss(self, served: Served) -> None:
        """A model takes no more requests; those that it has go on."""
        with self._wake:
            self._residents.dismiss(served)
            self._wake.notify()

    def drain(self) -> None:
        """The process is about to end: what came before goes on, and is taken in until `close`.

        Whoever takes requests refuses those that come later: see `takes`.
        """
        if self._draining_since_s is None:  # without the lock: a signal handler may call this
            self._draining_since_s = self.clock()

    def close(self, error: ServeError) -> None:
        """Take no more work, and end what there is with this error."""
        self.drain()
        with self._wake:
            self._closed = True
        self.abort(error)

    def abort(self, error: ServeError) -> None:
        """End every request with this error."""
        with self._wake:
            deliveries = self._executor.end_all(error)
            self._wake.notify()
        self._posting.send(deliveries)

    def stop(self) -> None:
        """End the thread after the call that is running. Requests that are left get an error."""
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
                self._posting.send(lapsed)
                self._residents.close_gone()
                if call is not None:
                    self._watchdog.begin(call)
                    deliveries = self._executor.execute(call)
                    self._watchdog.end()
                    self.cache_bytes = self._runner.cache_bytes
                    self._posting.send(deliveries)
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
            self._posting.send(deliveries)

    def _next_call(self) -> tuple[AnyCall | None, Deliveries]:
        """What to run, and what to tell those whose deadline cannot be met."""
        with self._wake:
            rested_s = self.clock() + _REST_S
            while not self._stopping:
                if self._residents.release():
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
