"""When requests are due: arrival processes of a given rate, reproducible by seed.

Gaps are drawn at a mean of one and then laid along the rate, which may be level or climb, so that
every process goes with every rate. It deliberately knows nothing of what is sent.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

SHAPES = ("closed", "constant", "poisson", "bursty", "onoff", "replay")
RATE_SYNTAX = "requests a second: 50, levels one after another 10,20,40, or a ramp 10..100"


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second, level or climbing evenly from the first to the last moment."""

    begin_per_s: float
    end_per_s: float

    @property
    def mean_per_s(self) -> float:
        return (self.begin_per_s + self.end_per_s) / 2

    def __str__(self) -> str:
        begin, end = f"{self.begin_per_s:g}", f"{self.end_per_s:g}"
        return f"{begin}/s" if begin == end else f"{begin}..{end}/s"

    def moment_s(self, count: float, duration_s: float) -> float:
        """When so many requests are due, of a rate that takes `duration_s` from begin to end."""
        climb = (self.end_per_s - self.begin_per_s) / duration_s
        if not climb:
            return count / self.begin_per_s
        # Where the integral of the rate reaches `count`; never, if a falling rate ends before.
        square = self.begin_per_s**2 + 2 * climb * count
        return (math.sqrt(square) - self.begin_per_s) / climb if square >= 0 else math.inf


@dataclass(frozen=True, slots=True)
class Process:
    """How arrivals scatter around their rate."""

    shape: str  # constant, poisson, bursty or onoff
    burstiness: float = 4.0  # variance of the gaps, where that of Poisson is 1; onoff: peak to mean
    period_s: float = 10.0  # of onoff

    def due_s(
        self, rate: Rate, duration_s: float, seed: str, most: int | None = None
    ) -> list[float]:
        """The moments of all arrivals within `duration_s`, ascending; of the first if there is a
        limit."""
        moments: list[float] = []
        for count in self._counts(random.Random(seed)):
            moment_s = rate.moment_s(count, duration_s)
            if moment_s >= duration_s or len(moments) == most:
                break
            moments.append(self._squeezed(moment_s) if self.shape == "onoff" else moment_s)
        return moments

    def _counts(self, draw: random.Random) -> Iterator[float]:
        """Moments of a process with a mean gap of one."""
        at = 0.0
        if self.shape == "constant":
            yield at
        while True:
            match self.shape:
                case "constant":
                    at += 1.0
                case "bursty":
                    at += draw.gammavariate(1 / self.burstiness, self.burstiness)
                case _:
                    at += draw.expovariate(1.0)
            yield at

    def _squeezed(self, moment_s: float) -> float:
        """The same share of its period, at the begin of which all of the period now comes."""
        begun = moment_s // self.period_s * self.period_s
        return begun + (moment_s - begun) / self.burstiness


def parse_rates(text: str) -> list[Rate]:
    """The levels, or the one ramp, that a text stands for; ValueError if it is none."""
    if ".." in text:
        begin, _, end = text.partition("..")
        return [Rate(_positive(begin, text), _positive(end, text))]
    return [Rate(value, value) for value in (_positive(part, text) for part in text.split(","))]


def _positive(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{whole!r} is no rate; write {RATE_SYNTAX}")
    return value
