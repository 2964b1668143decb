"""Objectives: what meets them, how sure that is, and the search for the highest rate that does."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from loadtest.__main__ import build_parser
from loadtest.capacity import drain_s_of, longest_s_of
from loadtest.mix import Operation
from loadtest.objective import ObjectiveError, Verdict, parse_objective
from loadtest.outcomes import Outcome, is_sure, percentile, percentile_interval, share_interval
from loadtest.search import Point, Search
from loadtest.target import Ask

WHOLE = Operation("classify", "m", Ask(1))
STREAM = Operation("generate", "m", Ask(1))


def answered(*times_ms: float) -> list[Outcome]:
    return [Outcome(WHOLE, float(at), time_ms) for at, time_ms in enumerate(times_ms)]


def verdict(text: str, outcomes: list[Outcome]) -> Verdict:
    [only] = parse_objective(text).verdicts(outcomes)
    return only


def test_a_limit_of_a_percentile_counts_failures_as_endless() -> None:
    fast = answered(*[10.0] * 99)
    assert verdict("latency_p99_ms<20", [*fast, *answered(500.0)]).met
    failed = [Outcome(WHOLE, 0.0, 1.0, "refused")] * 2
    missed = verdict("latency_p99_ms<20", [*fast, *failed])
    assert (missed.met, missed.value) == (False, None)
    assert verdict("latency_p50_ms<20", [*fast, *failed]).value == 10.0
    assert not verdict("latency_mean_ms<20", [*fast, *failed]).met


def test_each_kind_of_limit_is_measured_on_what_it_is_about() -> None:
    stream = Outcome(STREAM, 0.0, 90.0, first_token_ms=30.0, gaps_ms=(10.0, 20.0), tokens=3)
    right = replace(answered(5.0)[0], correct=True)
    outcomes = [stream, right, replace(right, correct=False), replace(right, error="broken")]
    assert verdict("ttft_p50_ms<40", outcomes).value == 30.0
    assert verdict("itl_p50_ms<15", outcomes).value == 10.0
    assert verdict("tpot_p50_ms<20", outcomes).value == 15.0  # one figure for each stream
    broken = replace(stream, error="broke off")
    assert not verdict("tpot_p99_ms<20", [stream, broken]).met
    assert not verdict("itl_p50_ms<25", [stream, broken, broken]).met  # refusing meets nothing
    assert verdict("itl_p50_ms<25", [stream, stream, broken]).met
    assert verdict("error_share<0.3", outcomes).value == 0.25
    assert verdict("accuracy>0.5", outcomes).met  # a broken answer with its label counts too
    assert not verdict("ttft_p50_ms<40", [right]).met
    objective = parse_objective("latency_p99_ms<50,ttft_p99_ms<40")
    assert [objective.good(one) for one in outcomes] == [False, True, True, False]


@pytest.mark.parametrize(
    "text",
    ["latency<5", "latency_p99_ms>5", "latency_p99_ms<x", "ttft_p100_ms<5", "accuracy<0.5", "p99"],
)
def test_what_is_no_limit_says_what_is(text: str) -> None:
    with pytest.raises(ObjectiveError, match=r"is no limit\. Write limits such as"):
        parse_objective(text)


def test_a_limit_needs_something_to_be_measured_on() -> None:
    with pytest.raises(ObjectiveError, match="needs a streamed endpoint"):
        parse_objective("ttft_p99_ms<5").check([WHOLE], labelled=False)
    with pytest.raises(ObjectiveError, match="--labels"):
        parse_objective("accuracy>0.5").check([WHOLE], labelled=False)
    parse_objective("ttft_p99_ms<5,accuracy>0.5").check([STREAM, WHOLE], labelled=True)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 1001)]
    assert [percentile(values, each) for each in (50, 99, 99.9, 100)] == [500, 990, 999, 1000]
    assert percentile([7.0], 1) == 7.0
    assert percentile([], 50) is None


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draw = random.Random(1)
    held = [0, 0]
    for _ in range(300):
        values = sorted(draw.random() for _ in range(400))
        interval = percentile_interval(values, 90)
        assert interval is not None
        held[0] += interval[0] <= 0.9 <= interval[1]
        low, high = share_interval(sum(value < 0.3 for value in values), 400) or (0.0, 0.0)
        held[1] += low <= 0.3 <= high
    assert all(275 <= count <= 299 for count in held)
    assert percentile_interval([1.0, 2.0], 99) is None


def test_sure_is_only_what_enough_requests_say() -> None:
    assert not is_sure([0.0] * 100, 0.01)  # none of 100 does not show that it is below 1 of 100
    assert is_sure([0.0] * 1000, 0.01)
    assert is_sure([1.0] * 500 + [0.0] * 500, 0.01)
    # The same share, but in one stretch: chance of the moment may have made all of it.
    spread_out = [float(index % 50 == 0) for index in range(2000)]
    one_stretch = [1.0] * 40 + [0.0] * 1960
    assert is_sure(spread_out, 0.01)
    assert not is_sure(one_stretch, 0.01)


@pytest.mark.parametrize(
    ("objective", "drain", "waits_s"),
    [
        ("latency_p99_ms<3000", [], 6.0),
        ("latency_p99_ms<3000", ["--drain", "5"], 5.0),
        ("latency_p99_ms<100", [], 2.0),
        ("ttft_p99_ms<100", [], 60.0),  # a stream may go on for long after its first token
        ("latency_p50_ms<100,error_share<0.01", ["--drain", "30"], 30.0),
    ],
)
def test_only_an_objective_of_latency_cuts_off_late_answers(
    objective: str, drain: list[str], waits_s: float
) -> None:
    asked = ["--url", "http://127.0.0.1:1", "--timeout", "60", *drain]
    options = build_parser().parse_args(asked)
    assert drain_s_of(options, parse_objective(objective)) == waits_s
    # Of the time that is announced, beside four times --duration.
    options.warm_up = 7.0
    assert longest_s_of(options, parse_objective(objective)) >= 4 * 30 + 7 + waits_s


def server(capacity_per_s: float, unsure: float = 0.0) -> Callable[[float, int], Point]:
    """A server that meets the objective below its capacity, but is moody near it."""
    draw = random.Random(5)

    def measure(rate_per_s: float, number: int) -> Point:
        near = abs(rate_per_s / capacity_per_s - 1) < unsure
        met = draw.random() < 0.5 if near else rate_per_s < capacity_per_s
        return Point(rate_per_s, met, not near)

    return measure


@pytest.mark.parametrize("start", [1.0, 37.0, 100.0, 5000.0])
def test_the_search_brackets_the_capacity(start: float) -> None:
    found = Search(server(100.0), precision=0.05, most_points=30).run(start)
    assert found.met_per_s is not None and found.missed_per_s is not None
    assert found.met_per_s <= 100.0 <= found.missed_per_s <= found.met_per_s * 1.05
    assert found.sure
    assert sum(point.rate_per_s == found.met_per_s for point in found.points) == 2
    assert len(found.points) <= 17


def test_the_search_says_when_it_is_not_sure() -> None:
    found = Search(server(100.0, unsure=0.1), precision=0.02, most_points=40).run(10.0)
    assert found.met_per_s == pytest.approx(100.0, rel=0.12)
    assert not found.sure
    assert "not surely" in found.sentence


def test_the_search_always_ends() -> None:
    nothing = Search(lambda rate, _: Point(rate, False, True), most_points=7).run(8.0)
    assert (nothing.met_per_s, len(nothing.points)) == (None, 7)
    assert "No rate was found" in nothing.sentence
    limited = Search(lambda rate, _: Point(rate, True, True, limited=rate > 60)).run(10.0)
    # Once more, since a sender may have been disturbed for a moment.
    assert [point.rate_per_s for point in limited.points] == [10, 20, 40, 80, 80]
    assert "the sender was saturated" in limited.sentence


def test_who_interrupts_when_told_of_a_point_still_has_it() -> None:
    def interrupt(point: Point) -> None:
        raise KeyboardInterrupt

    found = Search(server(100.0), interrupt).run(10.0)
    assert (found.met_per_s, len(found.points), found.ended) == (10.0, 1, "interrupted")
