"""Which of several ways of doing the same is quickest, found while it is done.

Each way is tried for a while now and then; the one that has taken the least time for its work is
used in between. Pure: it is told work and times, and asked what to do next.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

WayT = TypeVar("WayT")

_WEIGHT = 0.3  # of the newest trial of a way


@dataclass(slots=True)
class Trials(Generic[WayT]):
    """Ways in the order in which they are tried; work is counted in whatever unit."""

    ways: tuple[WayT, ...]
    trial_work: float
    chosen_work: float  # of the quickest way, between two trials
    seconds: dict[WayT, float] = field(default_factory=dict)  # for a unit of work
    _turn: int = 0
    _using: int = 0
    _work: float = 0.0
    _spent_s: float = 0.0

    @property
    def way(self) -> WayT:
        """What to use now."""
        return self.ways[self._using]

    @property
    def best(self) -> WayT:
        """The quickest way that is known."""
        return min(self.seconds, key=self.seconds.__getitem__, default=self.ways[0])

    def observe(self, work: float, seconds: float) -> None:
        """So much has been done in the way that is used now, in such a time."""
        self._work += work
        self._spent_s += seconds
        known = len(self.seconds) == len(self.ways)
        chosen = known and self.way == self.best
        if self._work >= (self.chosen_work if chosen else self.trial_work):
            self._keep()
            if known and not chosen:
                self._using = self.ways.index(self.best)
            else:
                self._turn = (self._turn + 1) % len(self.ways)
                self._using = self._turn

    def _keep(self) -> None:
        measured = self._spent_s / self._work
        known = self.seconds.get(self.way, measured)
        self.seconds[self.way] = known + _WEIGHT * (measured - known)
        self._work, self._spent_s = 0.0, 0.0
