"""Watches the call that runs: one that takes far too long is asked to end, and then given up.

A thread looks a few times a second; the thread that calls only notes what it runs. It deliberately
knows neither what a call is nor how one is ended: that is its keeper's affair.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

CallT = TypeVar("CallT")
# Only read through `Keeper`, which takes calls and gives none.
KeptT = TypeVar("KeptT", contravariant=True)

_LOOK_S = 0.1
# Between two looks. More than this passes only while the whole process stands still.
_MOST_PASSED_S = 0.5
# How often as long as usual a call must take to be late.
_LATE_TIMES = 10


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call may take."""

    stall_s: float = 1.5  # no call is late before
    stall_unknown_s: float = 10.0  # a call is late then of which nothing is known
    stall_exit_s: float = 5.0  # a call may take to end, once it was asked to


class Keeper(Protocol[KeptT]):
    """Knows calls, and what to do about them. Called on the watchdog's thread, save for `ended`."""

    def usual_s(self, call: KeptT) -> float | None:
        """How long such a call takes; None if that is not known."""
        ...

    def interrupt(self, call: KeptT, seconds: float) -> None:
        """A call is late: ask it to end."""
        ...

    def ended(self, call: KeptT) -> None:
        """A call that was asked to end is over. Called on the thread that ran it."""
        ...

    def give_up(self, call: KeptT, seconds: float) -> None:
        """A call was asked to end and does not."""
        ...


class Watchdog(Generic[CallT]):
    """One call at a time; each must be an object of its own."""

    def __init__(
        self, keeper: Keeper[CallT], patience: Patience, clock: Callable[[], float]
    ) -> None:
        self._keeper = keeper
        self._patience = patience
        self._clock = clock
        self._call: CallT | None = None
        self._asked = False
        self._lock = threading.Lock()  # between asking a call to end and noting that it has
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # What the watchdog's own thread has seen of the call.
        self._seen: CallT | None = None
        self._spent_s = 0.0
        self._limit_s = 0.0
        self._given_up = False
        self._looked_s = clock()

    @property
    def late_s(self) -> float | None:
        """How long the call that runs has taken, if that is far too long."""
        return self._spent_s if self._asked else None

    def begin(self, call: CallT) -> None:
        """This call runs now."""
        self._call = call

    def end(self) -> None:
        """It is over, however it ended."""
        call, self._call = self._call, None
        if not self._asked:
            return
        with self._lock:
            if self._asked and call is not None:
                self._keeper.ended(call)
            self._asked = False

    def start(self) -> None:
        """Look from now on."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """See how the call does, and act if it takes too long."""
        now_s = self._clock()
        passed_s = min(now_s - self._looked_s, _MOST_PASSED_S)
        self._looked_s = now_s
        call = self._call
        if call is not self._seen:
            # It may have begun right after the last look.
            self._seen, self._spent_s, self._limit_s, self._given_up = call, passed_s, 0.0, False
        elif call is not None:
            self._spent_s += passed_s
        if call is None or self._given_up:
            return
        if not self._asked:
            # It may rise while a call runs, for example when it begins to open a graph.
            self._limit_s = max(self._limit_s, self._most_s(call))
            if self._spent_s >= self._limit_s:
                self._ask(call)
        elif self._spent_s >= self._limit_s + self._patience.stall_exit_s:
            self._given_up = True
            self._keeper.give_up(call, self._spent_s)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _most_s(self, call: CallT) -> float:
        usual_s = self._keeper.usual_s(call)
        if usual_s is None:
            return max(self._patience.stall_s, self._patience.stall_unknown_s)
        return max(self._patience.stall_s, _LATE_TIMES * usual_s)

    def _ask(self, call: CallT) -> None:
        with self._lock:
            # Before looking whether the call is still there: `end` does the two the other way
            # round, so that no call that came after it is ever asked.
            self._asked = True
            if self._call is call:
                self._keeper.interrupt(call, self._spent_s)
            else:
                self._asked = False
