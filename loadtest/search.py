"""The search for the highest rate that meets an objective: doubling, then halving the interval.

Near the limit a test passes or fails by chance. So an unsure result is measured again, and the rate
that is found must meet the objective once more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class MeasuringEndedError(Exception):
    """No more rates can be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured rate. `limited`: by what sends, so that it says nothing of the server."""

    rate_per_s: float
    met: bool
    sure: bool
    limited: bool = False
    requests: int = 0
    good_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What was found: the highest rate that met the objective, and the lowest that did not."""

    met_per_s: float | None
    missed_per_s: float | None
    sure: bool
    points: Sequence[Point]
    ended: str  # why the search stopped

    @property
    def sentence(self) -> str:
        if self.met_per_s is None:
            return f"No rate was found that meets the objective: {self.ended}."
        above = "" if self.missed_per_s is None else f", and missed at {self.missed_per_s:.4g}/s"
        trust = "surely" if self.sure else "but not surely: measure longer"
        return f"The objective is met at {self.met_per_s:.4g}/s ({trust}){above}; {self.ended}."


@dataclass(slots=True)
class Search:
    """Looks for the highest rate; `measure` takes a rate and the number of the point.

    Each point is told when it is kept: whoever reads of one may interrupt the search at once.
    """

    measure: Callable[[float, int], Point]
    tell: Callable[[Point], None] = lambda point: None
    precision: float = 0.05
    most_points: int = 16
    _points: list[Point] = field(default_factory=list)
    _met: dict[float, bool] = field(default_factory=dict)  # and whether that is sure
    _missed: dict[float, bool] = field(default_factory=dict)

    def run(self, start_per_s: float) -> Capacity:
        """Find it, or stop when the points are used up; what was measured until then counts."""
        try:
            return self._narrow(start_per_s)
        except (MeasuringEndedError, KeyboardInterrupt) as ended:
            if not self._points:
                raise
            last = self._points[-1]
            if last.rate_per_s not in {*self._met, *self._missed}:
                self._file(last)
            return self._capacity(str(ended) or "interrupted")

    def _narrow(self, rate: float) -> Capacity:
        while (stop := self._stop()) is None:
            self._try(rate)
            low, high = self._bracket()
            if low is None:
                assert high is not None, "what is not met is missed"
                rate = high / 2
            elif high is None:
                rate = low * 2
            elif high <= low * (1 + self.precision):
                if self._confirmed(low):
                    return self._capacity(f"narrowed to {high / low - 1:.1%}")
                rate = low
            else:
                rate = math.sqrt(low * high)
        return self._capacity(stop)

    def _try(self, rate: float) -> None:
        point = self._measure(rate)
        if (point.limited or not point.sure) and self._stop() is None:
            # Twice unsure: met only if both were. A sender may have been disturbed once.
            again = self._measure(rate)
            point = again if point.limited or again.sure or not again.met else point
        self._file(point)

    def _file(self, point: Point) -> None:
        sides = (self._met, self._missed) if point.met else (self._missed, self._met)
        sides[0][point.rate_per_s] = point.sure
        sides[1].pop(point.rate_per_s, None)

    def _measure(self, rate: float) -> Point:
        point = self.measure(rate, len(self._points))
        self._points.append(point)
        self.tell(point)
        return point

    def _bracket(self) -> tuple[float | None, float | None]:
        high = min(self._missed, default=None)
        # What was met above a missed rate was luck.
        return max((rate for rate in self._met if high is None or rate < high), default=None), high

    def _confirmed(self, rate: float) -> bool:
        return sum(point.met for point in self._points if point.rate_per_s == rate) > 1

    def _stop(self) -> str | None:
        if len(self._points) >= self.most_points:
            return f"stopped after {len(self._points)} points"
        if len(self._points) > 1 and all(point.limited for point in self._points[-2:]):
            return "stopped since the sender was saturated: what sends is the limit, not the server"
        return None

    def _capacity(self, ended: str) -> Capacity:
        low, high = self._bracket()
        sure = low is not None and high is not None and self._met[low] and self._missed[high]
        return Capacity(low, high, sure, tuple(self._points), ended)
