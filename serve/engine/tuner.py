"""Finds the fastest of several options while they are in use."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from serve.runtime.protocol import MOST_AHEAD

OptionT = TypeVar("OptionT")

_FEW = 3  # rounds
_SETTLING = 0.25  # of a trial's work, not counted: switching has a cost of its own
_LOSS = 0.002  # of all time, that trials may cost where patience allows


@dataclass(slots=True)
class Tuner(Generic[OptionT]):
    """Finds the fastest of several options while they are in use.

    Now and then all options are tried one right after the other, since other load on the machine
    changes times more than the options differ. In between, the option that was fastest in most of
    the last rounds is used. While few rounds are known the next comes sooner; the more a round
    costs, the later. Pure: it is told work and times.
    """

    options: tuple[OptionT, ...]
    trial_work: float
    chosen_work: float  # of the best option, between two rounds
    patience: float = 1.0  # most factor on that where other options are far behind
    favour: float = 0.0  # how much faster another option must be than the first
    rounds: int = 5  # the choice is made from this many
    _best: int = 0
    _rounds: deque[Mapping[OptionT, float]] = field(init=False)
    _round: dict[OptionT, float] = field(default_factory=dict)  # seconds per unit of work
    _work: float = 0.0
    _counted: float = 0.0
    _spent_s: float = 0.0
    _until_next: float = 0.0  # work until the next round

    def __post_init__(self) -> None:
        self._rounds = deque(maxlen=self.rounds)

    @property
    def option(self) -> OptionT:
        """The option to use now."""
        return self.best if self._all_tried else self.options[len(self._round)]

    @property
    def best(self) -> OptionT:
        """The fastest option known."""
        return self.options[self._best]

    def observe(self, work: float, seconds: float) -> None:
        """This much work was done with the present option in this time."""
        settled = self._work >= _SETTLING * self.trial_work
        self._work += work
        if self._all_tried:
            if self._work >= self._until_next:
                self._round, self._work = {}, 0.0
        elif settled:
            self._counted += work
            self._spent_s += seconds
            if self._work >= self.trial_work:
                self._end_trial()

    @property
    def _all_tried(self) -> bool:
        return len(self._round) == len(self.options)

    def _end_trial(self) -> None:
        self._round[self.option] = self._spent_s / self._counted
        self._work = self._counted = self._spent_s = 0.0
        if self._all_tried:
            mean_s = sum(self._round.values()) / len(self.options)
            self._rounds.append(
                {option: seconds / mean_s for option, seconds in self._round.items()}
            )
            shares = [median(one[option] for one in self._rounds) for option in self.options]
            least = min(shares)
            self._best = shares.index(least) if least < (1 - self.favour) * shares[0] else 0
            self._until_next = self.chosen_work * len(self._rounds) / _FEW
            if len(self._rounds) >= _FEW:
                lost = self.trial_work * sum(share / least - 1 for share in shares)
                most = self.patience * self._until_next
                self._until_next = max(self._until_next, min(lost / _LOSS, most))


# Positions under way at most; with fewer, a position takes more steps before it drafts.
_POSITIONS = (MOST_AHEAD, MOST_AHEAD // 2)
_TRIAL_TOKENS, _CHOSEN_TOKENS, _TOKENS_PATIENCE, _TOKENS_ROUNDS = 64, 1024, 8, 9
# Speculation must gain this share over plain decoding.
_WORTH_SPECULATING = 0.08


def lead_tuner(steps: int) -> Tuner[int]:
    """How far a row of these steps runs ahead while it is alone."""
    return Tuner(
        leads_of(steps),
        _TRIAL_TOKENS,
        _CHOSEN_TOKENS,
        _TOKENS_PATIENCE,
        _WORTH_SPECULATING,
        _TOKENS_ROUNDS,
    )


def leads_of(steps: int) -> tuple[int, ...]:
    """The leads worth a trial, in steps before a draft; 0 is no speculation."""
    return (0, *sorted({-(-steps // most) for most in _POSITIONS})) if steps > 1 else (0,)
