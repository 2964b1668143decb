"""Times that are remembered."""

import pytest

from serve.engine.cost import Cost
from serve.engine.job import LaneKey

LANE = LaneKey("m", "classify", 1)


def test_averages_follow_the_newest() -> None:
    cost = Cost()
    assert cost.usual_s((LANE, "classify")) is None
    cost.observe_usual((LANE, "classify"), 1.0)
    cost.observe_usual((LANE, "classify"), 2.0)
    assert cost.usual_s((LANE, "classify")) == pytest.approx(1.2)
