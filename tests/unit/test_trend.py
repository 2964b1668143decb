"""Slopes of memory: what comes and goes is no growth, and what stays is."""

import random

import pytest

from benchmarks.soak import floors, trend

HOUR_S = 3600


def held(growth_mb_an_hour: float) -> list[tuple[float, float]]:
    """Two hours, a look every 10 s, of 300 MB and caches that come and go."""
    draw = random.Random(0)
    return [
        (at_s, 300 + growth_mb_an_hour * at_s / HOUR_S + draw.choice((0.0, 0.0, 20.0, 130.0)))
        for at_s in map(float, range(0, 2 * HOUR_S, 10))
    ]


@pytest.mark.parametrize("growth", [0.0, 2.0, 25.0])
def test_the_least_of_each_block_tells_growth_from_what_comes_and_goes(growth: float) -> None:
    found = trend(floors(held(growth)))
    assert found.per_hour == pytest.approx(growth, abs=0.5)
    assert found.low is not None and found.high is not None
    assert found.low - 0.5 <= growth <= found.high + 0.5


def test_few_values_have_a_slope_and_no_interval() -> None:
    assert trend([(0.0, 1.0), (HOUR_S, 3.0)]).low is None
    assert floors([(0.0, 3.0), (1.0, 2.0)]) == [(0.0, 3.0), (1.0, 2.0)]
