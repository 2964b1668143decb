"""The engine: one thread that plans a call, runs it, takes in what it gave, and delivers events.

    lock: plan  ->  run (no lock)  ->  lock: apply  ->  deliver

Requests come in from any thread through `submit` and `cancel`; events go out through `post`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve.bundle import LatencyEntry, steps_in_words
from serve.catalog import Catalog, Served
from serve.engine.backlog import Backlog, GenerationSize
from serve.engine.classify import ClassifyLane
from serve.engine.cost import Cost
from serve.engine.generate import Decoding, Prefilling
from serve.engine.job import (
    Deadline,
    Deliveries,
    FailedEvent,
    Job,
    Lane,
    LaneKey,
    Limits,
    State,
    in_requests,
    request_ids,
)
from serve.engine.loaded import Call, Common, EngineModel, Planner, new_cost
from serve.engine.search import SearchLane
from serve.engine.writing import Generation
from serve.errors import (
    DeadlineLapsed,
    Draining,
    ModelFailure,
    NotReady,
    ServeError,
    Stalled,
    Unprocessable,
)
from serve.metrics import Metrics

Post = Callable[..., Any]

_log = logging.getLogger("stepdial")


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
        self.soon: Soon = _deliver_here  # `soon(function)` runs it at the end of the loop's turn
        self._condition = condition
        self._asked = False

    def ask(self) -> None:
        """There is work to do."""
        if not self._asked:
            self._asked = True
            self.soon(self._wake)

    def _wake(self) -> None:
        self._asked = False
        with self._condition:
            self._condition.notify()


_LOOK_S = 0.1
# Time counted between two checks, at most: more passes only if the whole process was stopped.
_MOST_PASSED_S = 0.5
# A call is late when it takes this many times as long as usual.
_LATE_TIMES = 10


@dataclass(frozen=True, slots=True)
class StallLimits:
    """How long calls may take."""

    stall_s: float = 1.5  # no call is late before this
    stall_unknown_s: float = 10.0  # limit of a call of unknown cost
    stall_exit_s: float = 5.0  # how long an interrupted call may take to end


class Watchdog:
    """A call that takes far too long is asked to end; if it does not, the process ends.

    Its thread looks a few times a second; the engine's thread only notes which call runs. Each call
    must be an object of its own.
    """

    def __init__(
        self,
        metrics: Metrics,
        patience: StallLimits,
        clock: Callable[[], float],
        abort: Callable[[ServeError], None],
        leave: Callable[[], None],
    ) -> None:
        self._metrics = metrics
        self._patience = patience
        self._clock = clock
        self._abort = abort
        self._leave = leave
        self._call: Call | None = None
        self._asked = False
        self._lock = threading.Lock()  # held to interrupt a call and to note its end
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # State of the watchdog's own thread.
        self._seen: Call | None = None
        self._spent_s = 0.0
        self._limit_s = 0.0
        self._given_up = False
        self._looked_s = clock()

    @property
    def late_s(self) -> float | None:
        """How long the running call has taken, if it was interrupted."""
        return self._spent_s if self._asked else None

    def begin(self, call: Call) -> None:
        """This call runs now."""
        self._call = call

    def end(self) -> None:
        """The call is over, however it ended."""
        call, self._call = self._call, None
        if not self._asked:
            return
        with self._lock:
            if self._asked and call is not None:
                self.ended(call)
            self._asked = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Check the running call, and act if it takes too long."""
        now_s = self._clock()
        passed_s = min(now_s - self._looked_s, _MOST_PASSED_S)
        self._looked_s = now_s
        call = self._call
        if call is not self._seen:
            # It may have begun right after the last check.
            self._seen, self._spent_s, self._limit_s, self._given_up = call, passed_s, 0.0, False
        elif call is not None:
            self._spent_s += passed_s
        if call is None or self._given_up:
            return
        if not self._asked:
            # The limit may rise while a call runs, for example when it begins to open a graph.
            self._limit_s = max(self._limit_s, self._most_s(call))
            if self._spent_s >= self._limit_s:
                self._ask(call)
        elif self._spent_s >= self._limit_s + self._patience.stall_exit_s:
            self._given_up = True
            self.give_up(call, self._spent_s)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _most_s(self, call: Call) -> float:
        usual_s = self.usual_s(call)
        if usual_s is None:
            return max(self._patience.stall_s, self._patience.stall_unknown_s)
        return max(self._patience.stall_s, _LATE_TIMES * usual_s)

    def _ask(self, call: Call) -> None:
        with self._lock:
            # Set before looking whether the call still runs; `end` does it in the other order. So a
            # later call is never interrupted by mistake.
            self._asked = True
            if self._call is call:
                self.interrupt(call, self._spent_s)
            else:
                self._asked = False

    # What it knows of calls and does about late ones. `ended` is called on the engine's thread.

    def usual_s(self, call: Call) -> float | None:
        """The usual time of such a call; None if unknown."""
        if call.by.model.runtime.opening:
            return None
        known = [seconds for seconds in call.by.usual_s(call) if seconds]
        return max(known, default=None)

    def interrupt(self, call: Call, seconds: float) -> None:
        """A call is late: ask it to end."""
        problem = ": it is asked to end, and no request is taken until it has"
        self._log(logging.ERROR, call, seconds, problem)
        self._metrics.late_calls.labels(call.lane.name).inc()
        call.by.model.runtime.interrupt()

    def ended(self, call: Call) -> None:
        """An interrupted call has ended."""
        call.by.model.runtime.resume()
        if call.by.model.threw is not None:  # else it ended by itself
            self._metrics.terminated_calls.labels(call.lane.name).inc()

    def give_up(self, call: Call, seconds: float) -> None:
        """An interrupted call does not end."""
        problem = " and does not end: the process does, to be started again"
        self._log(logging.CRITICAL, call, seconds, problem)
        self._leave()
        name = call.lane.name
        self._abort(
            ModelFailure(f"{name} does not answer and is started again: send it again later")
        )

    def _log(self, level: int, call: Call, seconds: float, problem: str) -> None:
        lane, ids = call.lane, request_ids(call.jobs)
        _log.log(
            level,
            "a call of %s at %d steps%s has taken %.1f s%s",
            *(lane.name, lane.steps, in_requests(ids), seconds, problem),
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )


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
        self.cache_bytes = 0
        self._common = Common(limits, metrics, clock, recheck_share)
        self._jobs = self._common.jobs
        self.unread, self.answer = self._common.unread, self._common.answer
        self._models = self._common.models  # by key, those that leave included
        self._leaving: list[Served] = []
        self._rested_s = 0.0  # when checks may run that nobody waits for
        self._changed = False  # whether there may be something new to plan
        self._backlog = Backlog(self._common)
        self._turns: deque[Planner] = deque()
        self._lock = threading.Condition()
        self._waker = EngineWaker(self._lock)
        self._post: Post = _deliver_here  # until it is told how to reach an event loop
        self._patience = patience
        self._watchdog = Watchdog(metrics, patience, clock, self.abort, leave)
        self._thread: threading.Thread | None = None
        self._draining_since_s: float | None = None
        self._closed = False
        self._stopping = False
        self.dead = False  # whether the thread ended by a bug; it does not come back
        for served in catalog:
            self._add(served, None)
        metrics.watch(self, limits.cache_bytes)

    # State, from any thread.

    @property
    def queued(self) -> int:
        """Requests that wait: for a model, or to be parsed."""
        return self._jobs.queued + self.unread.waiting

    @property
    def running(self) -> int:
        """Requests that run: in a model, or while they are parsed."""
        return self._jobs.running + self.unread.running

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
        models = [(served.name, self._models.get(served.key)) for served in self.catalog]
        return tuple(name for name, one in models if one is not None and one.threw is not None)

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
        return tuple(self._leaving)

    def check_open(self) -> None:
        """Raise unless new requests are taken."""
        if self.draining:
            raise Draining("the server is shutting down: send the request to another")
        self._check_works()

    def _check_works(self) -> None:
        if self._closed:
            raise Draining("the server is shutting down: send the request to another")
        if self._thread is None or self.dead:  # a thread that ends by itself is dead
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
        with self._lock:
            return self._backlog.answer_s(lane, measured) if lane.model in self._models else None

    def cost(self, served: Served) -> Cost:
        """What calls of this model cost; nothing is known of one that is not served."""
        model = self._models.get(served.key)
        return Cost() if model is None else model.cost

    # Actions, from any thread.

    def start(self, post: Post | None = None, soon: Soon | None = None) -> None:
        """Start the thread; `post` and `soon` lead to an event loop."""
        assert self._thread is None, "an engine starts once"
        if post is not None:
            self._post = post
        if soon is not None:
            self._waker.soon = soon
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, *jobs: Job) -> None:
        """Queue the jobs of a request: all, or none and it raises."""
        with self._lock:
            self._check_works()
            now_s = self.clock()
            lanes = [self._lane(job) for job in jobs]
            self._backlog.check(jobs, now_s)
            for job, lane in zip(jobs, lanes, strict=True):
                self._jobs.add(job, lane, now_s)
                self._changed = True
            if jobs[0].deadline is not None:
                self.metrics.deadlines.labels(jobs[0].lane.name).inc()
        self._waker.ask()

    def check_unread(self, wait_s: float, deadline: Deadline | None) -> None:
        """Raise if a request has no place in the queue or no time to be parsed: see Backlog."""
        with self._lock:
            self._backlog.check_unread(wait_s, deadline, self.clock())

    def check_early(
        self,
        key: LaneKey,
        least: int,
        shortest: tuple[int, ...],
        longest: tuple[int, ...],
        given: Deadline,
    ) -> None:
        """Raise if a classification has no time whatever its text: see Backlog."""
        with self._lock:
            self._check_works()
            self._backlog.check_early(key, least, shortest, longest, given, self.clock())

    def steps_for(
        self, key: LaneKey, choices: Sequence[int], size: GenerationSize, deadline: Deadline | None
    ) -> int:
        """Of the choices, the steps for generations that come now; raises if none is in time."""
        with self._lock:
            return self._backlog.steps_for(key, choices, size, deadline, self.clock())

    def lapse(self, *jobs: Job) -> None:
        """The deadline of these jobs has passed: end them now, or at their next token."""
        with self._lock:
            deliveries = self._lapse(jobs)
            self._notify()
        self._send(deliveries)

    def cancel(self, job: Job) -> bool:
        """Nobody waits for it any more: drop the job now, or at its next token. No event is sent.

        False if it had ended.
        """
        if job.state is State.ENDED:  # most have: no need to wait for the lock
            return False
        with self._lock:
            if not self._jobs.end(job):
                return False
            self._notify()
        return True

    def serve(self, served: Served, cost: Cost | None = None) -> None:
        """A warm model takes requests, instead of another of its name if there is one."""
        with self._lock:
            replaced = self.catalog.get(served.name)
            self._add(served, cost)
            self.catalog.put(served)
            if replaced is not None:
                self._leaving.append(replaced)
            self._notify()

    def dismiss(self, served: Served) -> None:
        """A model takes no more requests; those it has go on."""
        with self._lock:
            if self.catalog.get(served.name) is not served:
                return  # it was dismissed or replaced before
            self.catalog.remove(served.name)
            self.metrics.hide(served.name)
            self._leaving.append(served)
            self._notify()

    def drain(self) -> None:
        """The process is about to end: requests from before go on, and are taken until `close`.

        Later requests are to be refused: see `takes`.
        """
        if self._draining_since_s is None:  # without the lock, for signal handlers
            self._draining_since_s = self.clock()

    def close(self, error: ServeError) -> None:
        """Take no more work, and end all requests with this error."""
        self.drain()
        with self._lock:
            self._closed = True
        self.abort(error)

    def abort(self, error: ServeError) -> None:
        """End all requests with this error."""
        with self._lock:
            deliveries = self._end_all(error)
            self._notify()
        self._send(deliveries)

    def stop(self) -> None:
        """End the thread after the running call. Requests that are left get an error."""
        self.drain()
        with self._lock:
            self._closed = self._stopping = True
            self._notify()
        if self._thread is not None:
            self._thread.join()
        self._watchdog.stop()
        self.abort(Draining("the server is shutting down: send the request to another"))

    # The thread.

    def _send(self, deliveries: Deliveries) -> None:
        if not deliveries:
            return
        try:
            self._post(_deliver_all, deliveries)
        except RuntimeError:
            # The event loop is closed, and so are its requests.
            _log.warning("%d events came after the server had closed", len(deliveries))

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self.step() is None:
                    self._wait()
        except BaseException:
            self._watchdog.end()
            _log.exception("the engine stopped; restart the server")
            with self._lock:
                self.dead = True
                deliveries = self._end_all(
                    NotReady("the engine has stopped: the server must be restarted")
                )
            self._send(deliveries)

    def step(self) -> Call | None:
        """Plan a call, run it and deliver what it gave; None if nothing can run now."""
        with self._lock:
            self._changed = False
            now_s = self.clock()
            deliveries = self._lapse(self._late(now_s))
            self._sweep()
            gone = self._release()  # before the plan: none of these may be called any more
            call = self._plan(now_s)
        if gone:
            # On a thread of its own, since freeing memory takes a while.
            closing = threading.Thread(target=_close, args=(gone,), name="closing", daemon=True)
            try:
                closing.start()
            except RuntimeError:  # the system allows no more threads
                _close(gone)
        self._send(deliveries)
        if call is None:
            return None
        self._watchdog.begin(call)
        try:
            result = call.by.run(call)
        except Exception as error:  # of the model: only the requests in the call end
            result = error
        with self._lock:
            deliveries = call.by.apply(call, result)
            self._sweep()
        self._watchdog.end()
        self._send(deliveries)
        self._rested_s = self.clock() + _REST_S
        return call

    def _wait(self) -> None:
        """Until something changes, or a batch or a deadline has waited long enough."""
        with self._lock:
            if self._changed or self._stopping:
                return
            lanes = list(self._classify_lanes())
            times = [self._jobs.next_deadline_s, *[lane.wake_s for lane in lanes]]
            wake_s = min((one for one in times if one is not None), default=None)
            if wake_s is None and any(lane.rechecks.waiting for lane in lanes):
                wake_s = self._rested_s
            wait_s = _IDLE_BEAT_S if wake_s is None else max(0.0, wake_s - self.clock())
            self._lock.wait(min(wait_s, _IDLE_BEAT_S))

    # With the lock held.

    def _plan(self, now_s: float) -> Call | None:
        """The next call, of the lanes in turn.

        Without work, it is a small call of a model that threw, or the recheck of a row.
        """
        for _ in range(len(self._turns)):
            planner = self._turns[0]
            self._turns.rotate(-1)
            if (call := planner.plan(now_s)) is not None:
                self._backlog.begin(call, now_s)
                return call
        self._backlog.rest()
        idle: list[Planner] = [model.check for model in self._models.values()]
        if now_s >= self._rested_s:
            idle += [lane.rechecks for lane in self._classify_lanes()]
        calls = (planner.plan(now_s) for planner in idle)
        return next((call for call in calls if call is not None), None)

    def _notify(self) -> None:
        self._changed = True
        self._lock.notify()

    def _late(self, now_s: float) -> list[Job]:
        """Jobs that are too late, or cannot be in time."""
        late = self._jobs.passed(now_s)
        for lane in self._classify_lanes():
            late += [job for job in lane.too_late(now_s) if job not in late]
        return late

    def _lapse(self, jobs: Iterable[Job]) -> Deliveries:
        """End jobs whose deadline has passed or cannot be met."""
        deliveries: Deliveries = []
        # A request may have several jobs, which share its deadline; ids are chosen by clients.
        requests: dict[int, str] = {}
        for job in jobs:
            assert job.deadline is not None
            text = job.work.text if isinstance(job.work, Generation) else None
            if self._jobs.end(job):
                requests[id(job.deadline)] = job.lane.name
                error = DeadlineLapsed(job.deadline.given_s, text)
                deliveries.append((job.work.deliver, FailedEvent(error)))
        for name in requests.values():
            self.metrics.lapsed.labels(name).inc()
        return deliveries

    def _end_all(self, error: ServeError) -> Deliveries:
        return [(job.work.deliver, FailedEvent(error)) for job in self._jobs if self._jobs.end(job)]

    def _sweep(self) -> None:
        """Drop what was held for jobs that have ended."""
        cached = self._common.cached()
        if self._jobs.ended:
            self._jobs.ended = False
            for lane in cached:
                lane.sweep()
        self.cache_bytes = sum([lane.nbytes for lane in cached])

    def _add(self, served: Served, cost: Cost | None) -> None:
        model = EngineModel(served, cost or new_cost(served), self._common)
        self._models[served.key] = model
        self.metrics.serve(served.manifest)

    def _release(self) -> list[Served]:
        """Forget models that have no users left; the caller closes them."""
        gone = [
            served
            for served in self._leaving
            if served.users == 0 and not self._jobs.of_model(served.key)
        ]
        for served in gone:
            self._leaving.remove(served)
            model = self._models.pop(served.key)
            self._turns = deque(one for one in self._turns if one.model is not model)
            model.forget()
        return gone

    def _lane(self, job: Job) -> Lane:
        """The lane of a job. ModelGone if its model is gone; Unprocessable if it is too large."""
        key = job.lane
        model = self._common.model(key)
        if key.kind != "classify":
            needed_bytes = model.batches(key.steps).bytes_for(job.positions, 1)
            if needed_bytes > self._common.limits.cache_bytes:
                raise _too_large(job, needed_bytes)
        return model.lanes.get(key) or self._open(model, key)

    def _open(self, model: EngineModel, key: LaneKey) -> Lane:
        lane: Lane
        if key.kind == "classify":
            self._turns.append(classify := ClassifyLane(key, model))
            lane = classify
        elif key.kind == "search":
            self._turns.append(search := SearchLane(key, model))
            model.cached.append(search)
            lane = search
        else:
            generate = self._decoding(model).open(key)
            model.cached.append(generate)
            lane = generate
        model.lanes[key] = lane
        return lane

    def _decoding(self, model: EngineModel) -> Decoding:
        """What decodes the rungs of a model."""
        for planner in self._turns:
            if isinstance(planner, Decoding) and planner.model is model:
                return planner
        decoding = Decoding(model)
        self._turns.extend([Prefilling(model, decoding.lanes), decoding])
        return decoding

    def _classify_lanes(self) -> Iterator[ClassifyLane]:
        for planner in self._turns:
            if isinstance(planner, ClassifyLane):
                yield planner


def _too_large(job: Job, needed_bytes: int) -> Unprocessable:
    """The error for a generation that needs more KV cache than the server has."""
    return Unprocessable(
        f"the prompt and max_tokens need {needed_bytes / 2**20:.1f} MiB of cache at "
        f"{steps_in_words(job.lane.steps)}, more than this server has: lower max_tokens or steps",
        param="max_tokens",
    )


def _close(gone: Sequence[Served]) -> None:
    for served in gone:
        served.model.close()
        _log.info("%s, edition %d, has left", served.name, served.edition)
