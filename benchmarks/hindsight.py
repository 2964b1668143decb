"""How near a prediction of calls could be that knew all of them, those that came later as well.

The same form as that of the latency model, fitted to all calls of a series at once, with what each
number of rows takes, and with the speed of each moment from the calls of the same kind around it,
the one in question left out. What is left is what no other call tells. Knows numbers only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve.parts import count_parts

_AROUND_S = 0.7  # before and after
_LEAST_AROUND = 3
_ROUNDS, _REWEIGHTED = 4, 30
_SMALL_ERROR = 0.03  # smaller ones weigh as much
_QUARTERS = 4  # of the lengths, in which a number of rows may take more or less
Numbers = NDArray[np.float64]


class TimedCall(NamedTuple):
    """One call, when it began, and how long it took."""

    steps: int
    rows: int
    length: int
    begun_s: float
    seconds: float


def errors(calls: Sequence[TimedCall], most_parts: int) -> list[float]:
    """What is left of the error of each, as a share of its time."""
    steps, rows, length, begun_s, seconds = np.array(calls, dtype=np.float64).T
    parts = np.array([count_parts(call.rows, most_parts) for call in calls])
    tokens = np.ceil(rows / parts) * length
    features = np.stack([np.ones(len(calls)), tokens / 1e3, tokens * length / 1e6])  # (3, N)
    kinds = [
        chosen
        for step in np.unique(steps)
        for parted in (False, True)
        if (chosen := np.flatnonzero((steps == step) & ((parts > 1) == parted))).size
    ]
    speed = np.ones(len(calls))
    for _ in range(_ROUNDS):
        usual = np.empty(len(calls))
        for chosen in kinds:
            usual[chosen] = _fitted(features[:, chosen], seconds[chosen] / speed[chosen])
        for chosen in _alike(rows, length):
            usual[chosen] *= np.median((seconds / usual / speed)[chosen])
        speed = _speeds(seconds / usual, begun_s, parts > 1)
    found: list[float] = np.abs(usual * speed / seconds - 1).tolist()
    return found


def _fitted(features: Numbers, seconds: Numbers) -> Numbers:
    """Least absolute errors, as shares of the time, by reweighting squares."""
    shares = (features / seconds).T
    weights = np.ones(len(shares))
    for _ in range(_REWEIGHTED):
        factors = np.linalg.lstsq(shares * weights[:, None], weights, rcond=None)[0]
        weights = np.maximum(_SMALL_ERROR, np.abs(shares @ factors - 1)) ** -0.5
    fitted: Numbers = (shares @ factors) * seconds
    return fitted


def _alike(rows: Numbers, length: Numbers) -> Iterator[NDArray[np.int64]]:
    quarter = np.minimum(_QUARTERS - 1, length * _QUARTERS // length.max())
    for number in np.unique(rows):
        for place in range(_QUARTERS):
            chosen = np.flatnonzero((rows == number) & (quarter == place))
            if len(chosen) > _LEAST_AROUND:
                yield chosen


def _speeds(ratios: Numbers, begun_s: Numbers, parted: NDArray[np.bool_]) -> Numbers:
    """The median of the others of the same kind around each; 1 where there are too few."""
    speeds = np.ones(len(ratios))
    for place, moment_s in enumerate(begun_s):
        near = (parted == parted[place]) & (np.abs(begun_s - moment_s) <= _AROUND_S)
        near[place] = False
        if near.sum() >= _LEAST_AROUND:
            speeds[place] = np.median(ratios[near])
    return speeds
