"""The watchdog: a call that takes far too long is asked to end, then given up.

A thread checks a few times a second; the engine's thread only notes which call runs.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from serve.engine.job import in_requests, request_ids
from serve.engine.loaded import Call
from serve.errors import ModelFailure, ServeError
from serve.metrics import Metrics

CallT = TypeVar("CallT")
# Calls only go in.
WatchedT = TypeVar("WatchedT", contravariant=True)

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


class StallPolicy(Protocol[WatchedT]):
    """What the watchdog knows of calls and does about late ones.

    Called on the watchdog's thread, except `ended`.
    """

    def usual_s(self, call: WatchedT) -> float | None:
        """The usual time of such a call; None if unknown."""
        ...

    def interrupt(self, call: WatchedT, seconds: float) -> None:
        """A call is late: ask it to end."""
        ...

    def ended(self, call: WatchedT) -> None:
        """An interrupted call has ended. Called on the thread that ran it."""
        ...

    def give_up(self, call: WatchedT, seconds: float) -> None:
        """An interrupted call does not end."""
        ...


class Watchdog(Generic[CallT]):
    """Watches one call at a time. Each call must be an object of its own."""

    def __init__(
        self, policy: StallPolicy[CallT], patience: StallLimits, clock: Callable[[], float]
    ) -> None:
        self._policy = policy
        self._patience = patience
        self._clock = clock
        self._call: CallT | None = None
        self._asked = False
        self._lock = threading.Lock()  # held to interrupt a call and to note its end
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # State of the watchdog's own thread.
        self._seen: CallT | None = None
        self._spent_s = 0.0
        self._limit_s = 0.0
        self._given_up = False
        self._looked_s = clock()

    @property
    def late_s(self) -> float | None:
        """How long the running call has taken, if it was interrupted."""
        return self._spent_s if self._asked else None

    def begin(self, call: CallT) -> None:
        """This call runs now."""
        self._call = call

    def end(self) -> None:
        """The call is over, however it ended."""
        call, self._call = self._call, None
        if not self._asked:
            return
        with self._lock:
            if self._asked and call is not None:
                self._policy.ended(call)
            self._asked = False

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
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
            self._policy.give_up(call, self._spent_s)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _most_s(self, call: CallT) -> float:
        usual_s = self._policy.usual_s(call)
        if usual_s is None:
            return max(self._patience.stall_s, self._patience.stall_unknown_s)
        return max(self._patience.stall_s, _LATE_TIMES * usual_s)

    def _ask(self, call: CallT) -> None:
        with self._lock:
            # Set before looking whether the call still runs; `end` does it in the other order. So a
            # later call is never interrupted by mistake.
            self._asked = True
            if self._call is call:
                self._policy.interrupt(call, self._spent_s)
            else:
                self._asked = False


_log = logging.getLogger("stepdial")


class EngineStallPolicy:
    """Interrupts late calls of the engine through the runtime; if that fails, ends the process."""

    def __init__(
        self, metrics: Metrics, abort: Callable[[ServeError], None], leave: Callable[[], None]
    ) -> None:
        self._metrics = metrics
        self._abort = abort
        self._leave = leave

    def usual_s(self, call: Call) -> float | None:
        if call.by.model.runtime.opening:
            return None
        known = [seconds for seconds in call.by.usual_s(call) if seconds]
        return max(known, default=None)

    def interrupt(self, call: Call, seconds: float) -> None:
        lane = call.lane
        ids = request_ids(call.jobs)
        _log.error(
            "a call of %s at %d steps%s has taken %.1f s: it is asked to end, and no request is "
            "taken until it has",
            *(lane.name, lane.steps, in_requests(ids), seconds),
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        self._metrics.late_calls.labels(lane.name).inc()
        call.by.model.runtime.interrupt()

    def ended(self, call: Call) -> None:
        call.by.model.runtime.resume()
        if call.by.model.threw is not None:  # else it ended by itself
            self._metrics.terminated_calls.labels(call.lane.name).inc()

    def give_up(self, call: Call, seconds: float) -> None:
        lane = call.lane
        ids = request_ids(call.jobs)
        _log.critical(
            "a call of %s at %d steps%s has taken %.1f s and does not end: the process does, to be "
            "started again",
            *(lane.name, lane.steps, in_requests(ids), seconds),
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        self._leave()
        self._abort(
            ModelFailure(f"{lane.name} does not answer and is started again: send it again later")
        )
