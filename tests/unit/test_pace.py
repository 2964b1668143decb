"""Times that are remembered."""

import pytest

from serve.engine.cost import CallTimes
from serve.engine.job import LaneKey

LANE = LaneKey("m", "classify", 1)


def test_averages_follow_the_newest() -> None:
    times = CallTimes()
    times.observe((LANE, "classify"), 1.0)
    times.observe((LANE, "classify"), 2.0)
    assert times.seconds((LANE, "classify")) == pytest.approx(1.2)
    times.drop_model("m")
    assert times.seconds((LANE, "classify")) is None
