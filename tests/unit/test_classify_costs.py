"""What rows cost decides how many of them share a call."""

from collections.abc import Callable

import pytest

from serve.engine.cost import ClassifyCosts, Cost, CostKey
from serve.engine.job import LaneKey

LANE = LaneKey("m", "classify", 8)


def costs(cost: Callable[[int, int], float], calls: int = 8) -> ClassifyCosts:
    """Of a model whose calls cost so much, which was seen to run that often at each size."""
    known = Cost()
    for rows, length in ((1, 32), (1, 128), (8, 32), (8, 128), (16, 64)) * calls:
        known.observe(CostKey("classify", 8), rows, length, cost(rows, length))
    return ClassifyCosts(known, LANE, 16)


def test_rows_whose_cost_adds_up_do_not_wait_for_many_others() -> None:
    by_the_row = costs(lambda rows, length: 0.0002 + 1e-4 * rows * length)
    assert by_the_row.enough_rows(8, 64) <= 2


def test_a_call_that_costs_much_by_itself_is_filled() -> None:
    by_the_call = costs(lambda rows, length: 0.005 + 8e-6 * rows * length)
    assert by_the_call.enough_rows(8, 64) == 16


@pytest.mark.parametrize("share", [0.5, 2.0, 8.0])
def test_as_many_are_done_in_a_second_as_in_full_calls(share: float) -> None:
    between = costs(lambda rows, length: 0.001 * share + 1e-5 * rows * length)
    rows = between.enough_rows(8, 64)
    assert between.call_s(8, rows, 64) / rows <= 1.03 * between.call_s(8, 16, 64) / 16


def test_calls_are_filled_while_little_is_known() -> None:
    assert costs(lambda rows, length: 1e-4 * rows * length, calls=1).enough_rows(8, 64) == 16
    assert ClassifyCosts(Cost(), LANE, 16).enough_rows(8, 64) == 16
