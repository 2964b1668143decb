"""Which of several ways of doing the same is quickest, found while it is done.

Now and then all ways are tried one right after the other, since what else runs on the machine
changes their times more than they differ; the one that was quickest in most of the last rounds is
used in between. The fewer rounds are known the sooner the next one comes: one alone may have been
unlucky. The more a round costs the longer the next one may wait: what is far behind is less likely
to come to the front. Pure: it is told work and times, and asked what to do next.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

WayT = TypeVar("WayT")

_FEW = 3  # rounds
_SETTLING = 0.25  # of a trial: the change to another way has costs of its own
_LOSS = 0.002  # of all time, that rounds may cost where there is patience for it


@dataclass(slots=True)
class Trials(Generic[WayT]):
    """Ways in the order in which they are tried; work is counted in whatever unit."""

    ways: tuple[WayT, ...]
    trial_work: float
    chosen_work: float  # of the quickest way, between two rounds when a few are known
    patience: float = 1.0  # how many times that, at most, when the others are far behind
    favour: float = 0.0  # by how much, of its time, another must be quicker than the first way
    rounds: int = 5  # that the choice is made from
    _best: int = 0
    _rounds: deque[Mapping[WayT, float]] = field(init=False)
    _round: dict[WayT, float] = field(default_factory=dict)  # seconds for a unit of work
    _work: float = 0.0
    _counted: float = 0.0
    _spent_s: float = 0.0
    _until_next: float = 0.0  # work from one round to the next

    def __post_init__(self) -> None:
        self._rounds = deque(maxlen=self.rounds)

    @property
    def way(self) -> WayT:
        """What to use now."""
        return self.best if self._all_tried else self.ways[len(self._round)]

    @property
    def best(self) -> WayT:
        """The quickest way that is known."""
        return self.ways[self._best]

    def observe(self, work: float, seconds: float) -> None:
        """So much has been done in the way that is used now, in such a time."""
        settled = self._work >= _SETTLING * self.trial_work
        self._work += work
        if self._all_tried:
            if self._work >= self._until_next:
                self._round, self._work = {}, 0.0
        elif settled:
            self._counted += work
            self._spent_s += seconds
            if self._work >= self.trial_work:
                self._keep()

    @property
    def _all_tried(self) -> bool:
        return len(self._round) == len(self.ways)

    def _keep(self) -> None:
        self._round[self.way] = self._spent_s / self._counted
        self._work = self._counted = self._spent_s = 0.0
        if self._all_tried:
            mean_s = sum(self._round.values()) / len(self.ways)
            self._rounds.append({way: seconds / mean_s for way, seconds in self._round.items()})
            shares = [median(one[way] for one in self._rounds) for way in self.ways]
            least = min(shares)
            self._best = shares.index(least) if least < (1 - self.favour) * shares[0] else 0
            self._until_next = self.chosen_work * len(self._rounds) / _FEW
            if len(self._rounds) >= _FEW:
                lost = self.trial_work * sum(share / least - 1 for share in shares)
                most = self.patience * self._until_next
                self._until_next = max(self._until_next, min(lost / _LOSS, most))
