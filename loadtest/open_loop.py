"""The open loop: one greenlet that sends each request when it is due, whatever became of others.

Latency counts from when a request was due, so that a slow server cannot slow its own load down and
so hide what callers would have waited. It deliberately knows nothing of Locust.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.pool import Group

from loadtest.alarm import Alarm
from loadtest.exchange import Line
from loadtest.outcomes import Outcome
from loadtest.plan import Plan
from loadtest.schedule import Shot

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
        self._line = Line(plan, _CONNECTIONS, in_flight)
        self._flights = Group()

    def run(self, is_over: Callable[[], bool]) -> None:
        """Send until all is sent, or until the test is over, and wait for the answers."""
        gc.freeze()  # the schedule stays; going through it again and again would delay requests
        alarm = Alarm()
        try:
            for shot in self._shots:
                body = self._plan.body(shot)
                moment_s = self._begin_s + shot.due_s
                while not (over := is_over()) and not alarm.approach(moment_s):
                    continue
                if over:
                    break
                self._plan.due += 1
                self._flights.start(gevent.Greenlet(self._fly, shot, body, moment_s))
            gevent.sleep(0)
            self._flights.join(timeout=self._plan.terms.drain_s)
        finally:
            alarm.close()
            self._flights.kill()
            self._line.close()

    def _fly(self, shot: Shot, body: bytes, moment_s: float) -> None:
        self._take(self._line.send(shot, body, moment_s, self._begin_epoch_s + shot.due_s))
