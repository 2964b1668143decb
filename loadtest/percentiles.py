"""Percentiles and shares of what was measured, with how sure they are.

It deliberately knows nothing of requests.
"""

import math
import statistics
from collections.abc import Sequence

_Z = 1.96  # of 95 %
_BATCHES = 10
_T = 2.262  # of 95 %, for the spread of so many batches


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: a value that was really measured."""
    return ranked(sorted(values), percent)


def ranked(ordered: Sequence[float], percent: float) -> float | None:
    """The same of values in ascending order."""
    if not ordered:
        return None
    # Rounded first, since 0.999 * 1000 is more than 999 in binary.
    rank = math.ceil(round(percent / 100 * len(ordered), 9))
    return ordered[max(rank, 1) - 1]


def percentile_interval(ordered: Sequence[float], percent: float) -> tuple[float, float] | None:
    """Between which measured values the true percentile lies, at 95 %.

    From the ranks alone, whatever the distribution, for values that do not depend on each other.
    None where there are too few values to say.
    """
    share, count = percent / 100, len(ordered)
    spread = _Z * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    if low < 0 or high >= count:
        return None
    return ordered[low], ordered[high]


def share_interval(hits: int, count: int) -> tuple[float, float] | None:
    """Wilson's interval of a share at 95 %."""
    if not count:
        return None
    share, square = hits / count, _Z**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    spread = math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    spread *= _Z / (1 + square / count)
    return max(middle - spread, 0.0), min(middle + spread, 1.0)


def mean(values: Sequence[float]) -> float | None:
    """The mean, or infinity if one of them is infinite."""
    return statistics.fmean(values) if values else None


def is_sure(values: Sequence[float], bound: float) -> bool:
    """Whether the mean of values in order of time is surely on its side of a bound, at 95 %.

    Requests of one moment share its queue, so the spread is that of batches of neighbours. Shares
    of 0 and 1 can only be told from the bound by how many there are.
    """
    middle = statistics.fmean(values)
    if not math.isfinite(middle):
        return True
    if set(values) <= {0.0, 1.0}:
        low, high = share_interval(round(sum(values)), len(values)) or (0.0, 1.0)
        if low <= bound <= high:
            return False
    size = len(values) // _BATCHES
    if not size:
        return False
    means = [statistics.fmean(values[at : at + size]) for at in range(0, size * _BATCHES, size)]
    spread = _T * statistics.stdev(means) / math.sqrt(_BATCHES)
    return abs(middle - bound) > spread
