"""Times that are remembered, and what is predicted from them."""

import pytest

from serve.engine.pace import CallTimes
from serve.scheduler.job import LaneKey

LANE = LaneKey("m", "classify", 1)
OTHER = LaneKey("g", "generate", 1)


def test_predictions_count_rounds_of_what_is_busy() -> None:
    times = CallTimes()
    times.observe((LANE, "classify"), 0.010)
    times.observe((OTHER, "decode"), 0.002)
    assert times.predict_s(LANE, [], 0, None) == pytest.approx(0.010)
    assert times.predict_s(LANE, [(LANE, "classify"), (OTHER, "decode")], 4, None) == (
        pytest.approx(5 * 0.012)
    )
    assert times.predict_s(OTHER, [(OTHER, "decode")], 0, None) == pytest.approx(0.002)


def test_what_was_measured_stands_in_for_what_was_not_seen() -> None:
    assert CallTimes().predict_s(LANE, [], 0, 0.5) == 0.5
    assert CallTimes().predict_s(LANE, [], 0, None) is None


def test_averages_follow_the_newest() -> None:
    times = CallTimes()
    times.observe((LANE, "classify"), 1.0)
    times.observe((LANE, "classify"), 2.0)
    assert times.seconds((LANE, "classify")) == pytest.approx(1.2)
