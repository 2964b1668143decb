"""The slope of a straight line through measured values, with its 95 % interval.

Neighbouring values depend on each other, so the line goes through the means of blocks of them.
It knows numbers alone.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

BLOCKS = 20
# Student's t for 95 %, by degrees of freedom up to those of all blocks.
_T95 = (
    *(0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26),
    *(2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10),
)


class Trend(NamedTuple):
    """How much more it is after an hour."""

    per_hour: float
    low: float | None
    high: float | None


def floors(values: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The least of each block, and when it was: what stays, without what comes and goes."""
    return [min(block, key=lambda one: one[1]) for block in _blocks(values)]


def trend(values: Sequence[tuple[float, float]]) -> Trend:
    """Of values at seconds; fewer than three of them have no interval."""
    blocks = _blocks(values)
    hours = [statistics.fmean(at_s for at_s, _ in block) / 3600 for block in blocks]
    means = [statistics.fmean(value for _, value in block) for block in blocks]
    if len(blocks) < 3:
        return Trend(0.0, None, None)
    slope, intercept = statistics.linear_regression(hours, means)
    pairs = zip(hours, means, strict=True)
    off = sum((value - intercept - slope * hour) ** 2 for hour, value in pairs)
    centre = statistics.fmean(hours)
    spread = sum((hour - centre) ** 2 for hour in hours)
    free = len(blocks) - 2
    wide = _T95[free] * math.sqrt(off / free / spread)
    return Trend(slope, slope - wide, slope + wide)


def _blocks(values: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    size = max(1, math.ceil(len(values) / BLOCKS))
    return [values[at : at + size] for at in range(0, len(values), size)]
