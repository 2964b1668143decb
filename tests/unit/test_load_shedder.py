"""Work falls in proportion to what waits, and rises again without flapping."""

import pytest

from serve.engine.loaded import LoadShedder


def test_nothing_is_spared_before_the_wait_begins_to_matter() -> None:
    shedder = LoadShedder(0.5)
    assert [shedder.share(wait_s) for wait_s in (0.0, 0.2, 0.5)] == [1.0, 1.0, 1.0]


def test_the_share_falls_at_once_and_in_proportion() -> None:
    shedder = LoadShedder(0.5)
    assert shedder.share(1.0) == 0.5
    assert shedder.share(4.0) == 0.125


def test_it_rises_only_when_the_wait_has_halved() -> None:
    shedder = LoadShedder(0.5)
    shedder.share(4.0)
    assert [shedder.share(wait_s) for wait_s in (3.9, 3.0, 2.1)] == [0.125] * 3
    assert shedder.share(2.0) == 0.25
    assert shedder.share(2.5) == pytest.approx(0.2)
    assert shedder.share(0.5) == 1.0


def test_a_wait_that_wavers_does_not_make_the_share_flap() -> None:
    shedder = LoadShedder(0.5)
    seen = {shedder.share(wait_s) for wait_s in (1.0, 0.8, 0.99, 0.7, 0.95, 0.6) * 20}
    assert seen == {0.5}


def test_switched_off_it_spares_nothing() -> None:
    shedder = LoadShedder(None)
    assert shedder.share(1e9) == 1.0
    assert shedder.drain_s(10.0, [0.125, 1.0]) == 10.0


@pytest.mark.parametrize("wait_s", [0.3, 1.0, 3.0, 10.0, 100.0])
def test_the_predicted_drain_is_that_of_small_batches(wait_s: float) -> None:
    costs = [0.125, 0.25, 0.5, 1.0]
    predicted = LoadShedder(0.5).drain_s(wait_s, costs)
    shedder, left_s, spent_s = LoadShedder(0.5), wait_s, 0.0
    while left_s > 0:
        share = shedder.share(left_s)
        cost = max((one for one in costs if one <= share), default=costs[0])
        part_s = min(0.01, left_s)
        spent_s += part_s * cost
        left_s -= part_s
    assert predicted == pytest.approx(spent_s, rel=0.05)
