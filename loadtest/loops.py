"""The simulated callers of closed and open loops, and the worker processes of a distributed test.

Only the process that Locust starts imports this file.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.hub import get_hub
from gevent.pool import Group
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import STATE_MISSING, MasterRunner
from locust.user.task import LOCUST_STATE_RUNNING

from loadtest.arrivals import rest_s
from loadtest.client import CUT_SHORT, AnswerError, Connections
from loadtest.outcomes import Outcome
from loadtest.plan import Plan
from loadtest.schedule import Shot

# Wakes a greenlet at a given time, to a fraction of a millisecond. gevent's own timers are as
# coarse as its poll, a millisecond or more, which would count as latency of the server. Timer files
# are used where the system has them.


_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_NO_BLOCK = os.O_NONBLOCK
_LONGEST_S = 0.5  # of one wait: in between, a caller checks whether the test is over


class _Setting(ctypes.Structure):
    """struct itimerspec: an interval, unused, and a moment."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "moment_s", "moment_ns")
    )


class Timer:
    """One timer of one greenlet; moments are those of time.monotonic()."""

    def __init__(self) -> None:
        self._file: int | None = None
        if sys.platform == "linux":
            self._system = ctypes.CDLL(None, use_errno=True)
            made = self._system.timerfd_create(time.CLOCK_MONOTONIC, _NO_BLOCK)
            self._file = made if made >= 0 else None
        hub = get_hub()
        self._watcher: Any = None if self._file is None else hub.loop.io(self._file, 1)

    def approach(self, moment_s: float) -> bool:
        """Wait for the moment, or for half a second; whether it has come."""
        left_s = moment_s - time.monotonic()
        if left_s <= 0:
            gevent.sleep(0)  # others may have something to send
            return True
        if self._file is None or left_s > _LONGEST_S:
            gevent.sleep(min(left_s, _LONGEST_S))
        else:
            self._wait(moment_s)
        return time.monotonic() >= moment_s

    def close(self) -> None:
        """Give the timer back."""
        if self._file is not None:
            self._watcher.close()
            os.close(self._file)
            self._file = None

    def _wait(self, moment_s: float) -> None:
        whole_s = int(moment_s)
        setting = _Setting(0, 0, whole_s, int((moment_s - whole_s) * 1e9))
        assert self._file is not None
        self._system.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None)
        get_hub().wait(self._watcher)
        os.read(self._file, 8)


# The open loop: one greenlet that sends each request when it is due, however slow the others are.
# Latency counts from the time a request was due: a slow server cannot slow its own load down and
# hide the wait.


# More than a process may have open; what a connection costs is part of the latency.
_CONNECTIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a schedule one process sends, and when the schedule begins."""

    index: int
    of: int
    begin_s: float  # of the epoch

    def of_count(self, count: int) -> int:
        """Its part of so many."""
        return count // self.of + (self.index < count % self.of)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "Share":
        """As it was sent to a worker."""
        return cls(**data)


class OpenLoop:
    """Sends its share of a schedule and waits for the answers."""

    def __init__(self, plan: Plan, share: Share, take: Callable[[Outcome], None]) -> None:
        assert plan.schedule is not None, "an open loop has a schedule"
        self._plan, self._take = plan, take
        self._shots: Sequence[Shot] = plan.schedule.share(share.index, share.of)
        self._begin_epoch_s = share.begin_s
        self._begin_s = time.monotonic() + share.begin_s - time.time()
        limit = plan.terms.max_in_flight
        in_flight = None if limit is None else share.of_count(limit)
        self._connections = Connections(plan, _CONNECTIONS, in_flight)
        self._requests = Group()

    def run(self, is_over: Callable[[], bool]) -> None:
        """Send until all is sent, or until the test is over, and wait for the answers."""
        gc.freeze()  # the schedule stays; going through it again and again would delay requests
        timer = Timer()
        try:
            for shot in self._shots:
                body = self._plan.body(shot)
                moment_s = self._begin_s + shot.due_s
                while not (over := is_over()) and not timer.approach(moment_s):
                    continue
                if over:
                    break
                self._plan.due += 1
                self._requests.start(gevent.Greenlet(self._send, shot, body, moment_s))
            gevent.sleep(0)
            self._requests.join(timeout=self._plan.terms.drain_s)
        finally:
            timer.close()
            self._requests.kill()
            self._connections.close()

    def _send(self, shot: Shot, body: bytes, moment_s: float) -> None:
        self._take(self._connections.send(shot, body, moment_s, self._begin_epoch_s + shot.due_s))


# The worker processes of a distributed test, as their master sees them. Locust gives its workers
# half a second to report once a test is over, so that answers which take longer would be lost:
# here each is told to end, and says when it has its last answer.


SHARE, SENT, END, ENDED = (f"stepdial_{word}" for word in ("share", "sent", "end", "ended"))


class Workers:
    """All workers that a test began with."""

    def __init__(self, runner: MasterRunner) -> None:
        self._runner = runner
        self.names = [*runner.clients]
        self._sent: set[str] = set()
        self._ended: set[str] = set()

    def share_out(self, begin_s: float) -> None:
        """Tell each which part of the schedule is its own, and when that begins."""
        for index, name in enumerate(self.names):
            share = {"index": index, "of": len(self.names), "begin_s": begin_s}
            self._runner.send_message(SHARE, share, client_id=name)

    def has_sent(self, name: str) -> None:
        """One has sent all of its share, and has the answers."""
        self._sent.add(name)

    def has_ended(self, name: str) -> None:
        """One has told all that it saw."""
        self._ended.add(name)

    @property
    def is_gone(self) -> bool:
        """Whether nobody is left of it."""
        return all(map(self._is_gone, self.names))

    def await_sent(self, is_over: Callable[[], bool]) -> None:
        """Wait until everything is sent; a worker that is gone sends no more."""
        while not is_over() and not self._all(self._sent):
            gevent.sleep(0.05)

    def dismiss(self, patience_s: float) -> int:
        """Have all end, and wait for what they saw last; how many never told."""
        self.tell_to_end(at_once=False)
        give_up_s = time.monotonic() + patience_s
        while not self._all(self._ended) and time.monotonic() < give_up_s:
            gevent.sleep(0.02)
        return len({*self.names} - self._ended)

    def tell_to_end(self, at_once: bool) -> None:
        """At once: without the answers that are still due."""
        for name in self.names:
            if name in self._runner.clients:
                self._runner.send_message(END, {"at_once": at_once}, client_id=name)

    def _all(self, done: set[str]) -> bool:
        return all(name in done or self._is_gone(name) for name in self.names)

    def _is_gone(self, name: str) -> bool:
        worker = self._runner.clients.get(name)
        return worker is None or worker.state == STATE_MISSING


_LOOK_S = 0.1  # how often one who rests looks whether the test is over
OVER = ("stopping", "stopped", "cleanup")  # states of a runner

# Of the test that runs: Locust makes its users itself, and gives them nothing but this.
plans: dict[Environment, Plan] = {}
shares: dict[Environment, Share] = {}


class Caller(User):
    """One client with kept-alive connections."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._plan = plans[environment]
        self._connections = Connections(self._plan, connections=1)

    @task
    def ask(self) -> None:
        """Send one request after another until told to stop, or the whole of a schedule."""
        if self._plan.terms.open:
            self._send_share()
            raise StopUser
        # A task that comes back would be between tasks for a moment, in which Locust ends a user at
        # once: by then in the midst of its next request, whose answer would be lost.
        plan, error = self._plan, None
        share = shares.pop(self.environment, None)
        if share is not None and plan.left is not None:
            plan.left = share.of_count(plan.left)
        while self._state == LOCUST_STATE_RUNNING and error != CUT_SHORT and plan.left != 0:
            shot, body = plan.next_request()
            plan.under_way += 1
            outcome = self._connections.send(shot, body, time.monotonic(), time.time())
            plan.under_way -= 1
            self._take(outcome)
            error = outcome.error
            if plan.left != 0:
                self._rest(max(rest_s(outcome, plan.terms.max_rest_s), plan.think_s()))
        if plan.left == plan.under_way == 0:
            self._tell_sent()
        raise StopUser

    def on_stop(self) -> None:
        """Leave no connection behind."""
        self._connections.close()

    def _rest(self, seconds: float) -> None:
        """Until then, or until told to stop."""
        until_s = time.monotonic() + seconds
        while self._state == LOCUST_STATE_RUNNING and (left_s := until_s - time.monotonic()) > 0:
            gevent.sleep(min(left_s, _LOOK_S))

    def _send_share(self) -> None:
        environment, runner = self.environment, self.environment.runner
        assert runner is not None, "users are run by a runner"
        share = shares.pop(environment, None)
        if share is None:  # a user who was added from the page: another sends all of it
            return
        OpenLoop(self._plan, share, self._take).run(lambda: runner.state in OVER)
        self._tell_sent()

    def _tell_sent(self) -> None:
        runner = self.environment.runner
        assert runner is not None, "users are run by a runner"
        runner.send_message(SENT)

    def _take(self, outcome: Outcome) -> None:
        self._plan.outcomes.append(outcome)
        self.environment.events.request.fire(
            request_type="POST",
            name=str(outcome.operation),
            response_time=outcome.total_ms,
            response_length=0,
            exception=AnswerError(outcome.error) if outcome.error else None,
            context={},
        )
