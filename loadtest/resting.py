"""How long a caller of a closed loop rests before it asks again.

People think between two questions. Those who are told to come back later do, and where nobody
answers they do not knock without a pause; without that, a few callers would fill a report with what
one refusal was. It deliberately knows nothing of how resting is done.
"""

import math
import random
from dataclasses import dataclass

from loadtest.outcomes import Outcome

THINK_SYNTAX = "seconds: 2, 1..5 drawn evenly, or exp:2 with that mean"
_KNOCK_S = 1.0  # between two attempts where there is no server
_EXPONENTIAL = "exp:"


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """Between an answer and the next question of the same caller; a mean is drawn around."""

    low_s: float
    high_s: float
    exponential: bool = False

    def draw_s(self, chance: random.Random) -> float:
        """One such time."""
        if self.exponential:
            return chance.expovariate(1 / self.low_s)
        return chance.uniform(self.low_s, self.high_s)

    def __str__(self) -> str:
        if self.exponential:
            return f"thinks {self.low_s:g} s in the mean"
        if self.low_s == self.high_s:
            return f"thinks {self.low_s:g} s"
        return f"thinks {self.low_s:g} to {self.high_s:g} s"


def parse_think_time(text: str) -> ThinkTime:
    """What a text such as 2, 1..5 or exp:2 stands for; ValueError if it is none."""
    low, dots, high = text.removeprefix(_EXPONENTIAL).partition("..")
    try:
        found = float(low), float(high if dots else low)
    except ValueError:
        found = -1.0, -1.0
    drawn = text.startswith(_EXPONENTIAL)
    if not 0 <= found[0] <= found[1] < math.inf or (drawn and (dots or not found[0])):
        raise ValueError(f"{text!r} is no think time; write {THINK_SYNTAX}")
    return ThinkTime(*found, drawn)


def rest_s(outcome: Outcome, most_s: float) -> float:
    """Seconds from the end of a request to the next."""
    if outcome.retry_after_s is not None:
        return min(outcome.retry_after_s, most_s)
    if outcome.error is not None and outcome.status is None:
        return min(max(_KNOCK_S - outcome.total_ms / 1e3, 0.0), most_s)
    return 0.0
