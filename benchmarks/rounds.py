"""Rounds: several things measured in turn, again and again, so that all meet the same noise.

A machine that slows down for a while slows all of them; what is compared stays comparable. It
deliberately knows nothing of what is measured.
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
SampleT = TypeVar("SampleT")


def interleave(
    calls: Mapping[KeyT, Callable[[], SampleT]],
    seconds: float,
    least: int,
    most: int = 200,
) -> dict[KeyT, list[SampleT]]:
    """Call each once a round, in a shuffled order, for some seconds and at least so many rounds.

    The first call of each is not kept: it pays for what is done only once. Entry n of every list
    is from the same round.
    """
    for call in calls.values():
        call()
    kept: dict[KeyT, list[SampleT]] = {key: [] for key in calls}
    order = list(calls)
    shuffled = random.Random(0)
    begun_s, rounds = time.perf_counter(), 0
    while rounds < most and (rounds < least or time.perf_counter() - begun_s < seconds):
        shuffled.shuffle(order)
        for key in order:
            kept[key].append(calls[key]())
        rounds += 1
    return kept


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that this share of all is at most."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The middle of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))
