"""The worker processes of a distributed test, as their master sees them.

Locust gives its workers half a second to report once a test is over, so that answers which take
longer would be lost: here each is told to end, and says when it has its last answer.
It deliberately knows nothing of requests and of reports.
"""

import time
from collections.abc import Callable

import gevent
from locust.runners import STATE_MISSING, MasterRunner

SHARE, SENT, END, ENDED = (f"stepdial_{word}" for word in ("share", "sent", "end", "ended"))


class Crew:
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
