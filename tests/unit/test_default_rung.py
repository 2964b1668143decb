"""Which rungs get words, and which one answers where nothing was asked."""

from dataclasses import replace

import numpy as np
import pytest

from export.quality import Measured, choose_default, held_out_batches, name_efforts, range_of
from serve.bundle import Metric, Quality, TextInput
from tests.fixtures.tiny_folders import classify_bundle
from train.data import open_dataset
from train.recipe import load_recipe
from train.tally import half_interval


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


def test_no_difference_in_few_rows_is_not_shown_to_be_none() -> None:
    for rows, most in ((2, 0.66), (100, 0.037), (2000, 0.002)):
        one, eight = (measured("accuracy", [1.0] * rows) for _ in range(2))
        found = range_of({1: one, 8: eight})
        assert found is not None and (found.value, found.low) == (0.0, -found.high)
        assert found.high == pytest.approx(most, rel=0.05)
    one, eight = measured("accuracy", [0.0, 1.0, 1.0]), measured("accuracy", [1.0, 1.0, 1.0])
    found = range_of({1: one, 8: eight})
    assert found is not None and (found.low, found.high) == (-1.0, 1.0)
    windows = measured("loss", [1.0, 1.2, 1.1]), measured("loss", [1.1, 1.2, 1.3])
    few = range_of({1: windows[1], 8: windows[0]})
    assert few is not None and few.high - few.value == pytest.approx(0.2484, rel=0.01)  # by scipy
    draw = np.random.default_rng(0)
    beyond = 0
    for _ in range(2000):
        apart = draw.standard_normal(4)
        beyond += abs(apart.mean()) > half_interval(apart, "loss")
    assert 0.03 < beyond / 2000 < 0.07  # a true mean of 0, with 95 % confidence


def test_some_rows_are_rows_of_all_lengths() -> None:
    recipe = load_recipe("parity", ["data.rows=1500", "data.longest=12", "model.window=16"])
    dataset = open_dataset(recipe)
    lengths = [len(row) for batch in dataset.held_out(1) for row in batch.inputs[0]]
    manifest = replace(classify_bundle().manifest, input=TextInput(max_tokens=256))
    assert len(lengths) > 100
    for samples in (4, 20, 40, 60):
        batches = [*held_out_batches(dataset, manifest, samples)]
        rows = sum(len(batch.targets) for batch in batches)
        assert abs(rows - samples) <= 4
        middle = np.mean([batch.inputs[0].shape[1] for batch in batches])
        assert abs(middle - np.mean(lengths)) < 0.25 * np.mean(lengths)
