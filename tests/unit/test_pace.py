"""Rates and times that are remembered, and what is predicted from them."""

import pytest

from serve.job import LaneKey
from serve.pace import CallTimes, ServiceRate

LANE = LaneKey("m", "classify", 1)
OTHER = LaneKey("g", "generate", 1)


def test_the_wait_follows_the_rate() -> None:
    rate = ServiceRate()
    for _ in range(200):
        rate.busy(0.1, 2)
    assert rate.wait_s(40) == pytest.approx(2.0)


def test_before_anything_is_known_the_wait_is_a_second() -> None:
    assert ServiceRate().wait_s(100) == 1.0


def test_the_rate_forgets() -> None:
    rate = ServiceRate()
    for _ in range(1000):
        rate.busy(0.1, 10)
    for _ in range(1000):
        rate.busy(0.1, 1)
    assert rate.wait_s(10) == pytest.approx(1.0, rel=0.01)


def test_a_long_call_is_no_accident_of_arithmetic() -> None:
    rate = ServiceRate()
    rate.busy(1.0, 5)
    rate.busy(60.0, 3)
    assert rate.wait_s(3) == pytest.approx(60.0)


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
