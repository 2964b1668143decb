"""Which rungs get words, and which one answers where nothing was asked."""

import numpy as np

from export.quality import Measured, choose_default, name_efforts
from serve.bundle import Metric, Quality


def test_efforts_are_spread_over_the_rungs() -> None:
    assert name_efforts([1]) == {1: "max"}
    assert name_efforts([1, 2]) == {1: "low", 2: "max"}
    assert name_efforts([1, 2, 4]) == {1: "low", 2: "medium", 4: "max"}
    assert name_efforts([1, 2, 4, 8]) == {1: "low", 2: "medium", 4: "high", 8: "max"}
    assert name_efforts([1, 2, 4, 6, 8, 16]) == {1: "low", 2: "medium", 8: "high", 16: "max"}


def measured(metric: Metric, per_row: list[float]) -> Measured:
    rows = np.array(per_row, np.float64)
    value = float(rows.mean())
    return Measured(Quality(metric, value, value, value, len(rows)), rows)


def test_the_default_is_the_cheapest_rung_that_is_as_good_as_the_best() -> None:
    draw = np.random.default_rng(0)
    rows = (2 + draw.random(400)).tolist()
    noise = (draw.standard_normal(400) * 0.05).tolist()
    best = measured("loss", rows)
    noisy = measured("loss", [a + b for a, b in zip(rows, noise, strict=True)])
    surely_worse = measured("loss", [a + 0.02 for a in rows])  # by far less than rows differ
    hardly_worse = measured("loss", [a + 0.0005 for a in rows])
    assert choose_default({1: surely_worse, 2: best, 4: best}) == 2
    assert choose_default({1: hardly_worse, 2: best}) == 1
    assert choose_default({1: surely_worse, 2: noisy, 8: best}) == 2
    right = measured("accuracy", [1.0] * 900 + [0.0] * 100)
    one_less = measured("accuracy", [1.0] * 899 + [0.0] * 101)
    many_less = measured("accuracy", [1.0] * 880 + [0.0] * 120)
    assert choose_default({1: many_less, 2: one_less, 4: right}) == 2


def test_few_rows_never_make_the_slowest_rung_the_default() -> None:
    """4 of 30 wrong beside 2 of 30 shows nothing; beside none of 30, or of 1,000 rows, it does."""

    def wrong(count: int, rows: int) -> Measured:
        return measured("accuracy", [0.0] * count + [1.0] * (rows - count))

    assert choose_default({1: wrong(4, 30), 4: wrong(2, 30)}) == 1
    assert choose_default({1: wrong(9, 30), 4: wrong(0, 30)}) == 4
    assert choose_default({1: wrong(133, 1000), 4: wrong(67, 1000)}) == 4
    assert choose_default({1: wrong(1, 1), 4: wrong(0, 1)}) == 1
