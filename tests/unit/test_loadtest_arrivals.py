"""When requests are due: rates, processes, traces, and the schedule that is made of them."""

import gzip
import itertools
import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import Entry, Process, Rate, TraceError, parse_rates, read_trace, replay
from loadtest.mix import Operation
from loadtest.outcomes import WARM_UP
from loadtest.schedule import RAMP_PARTS, Schedule, Scheduler, Terms, parse_duration, parse_levels
from loadtest.target import Ask

FAST, SLOW = (Operation("generate", "m", Ask(steps)) for steps in (1, 8))
SHAPES = ("constant", "poisson", "bursty", "onoff")


def scheduled(terms: Terms, trace: tuple[Entry, ...] = ()) -> Schedule:
    return Scheduler(terms, {FAST: 3.0, SLOW: 1.0}, trace).lay()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [Rate(50.0, 50.0), Rate(10.0, 90.0), Rate(90.0, 10.0)])
def test_every_process_keeps_every_rate(shape: str, rate: Rate) -> None:
    due_s = Process(shape, burstiness=2.0).due_s(rate, 200.0, "a")
    assert due_s == sorted(due_s)
    assert due_s[0] >= 0
    assert due_s[-1] < 200.0
    assert len(due_s) == pytest.approx(10_000, rel=0.05)
    first = sum(moment_s < 100.0 for moment_s in due_s) / len(due_s)
    assert first == pytest.approx((3 * rate.begin_per_s + rate.end_per_s) / 400, abs=0.03)


@pytest.mark.parametrize(
    ("process", "variance"),
    [(Process("constant"), 0.0), (Process("poisson"), 1.0), (Process("bursty", 6.0), 6.0)],
)
def test_gaps_scatter_as_much_as_was_asked(process: Process, variance: float) -> None:
    due_s = process.due_s(Rate(100.0, 100.0), 400.0, "b")
    gaps = [100.0 * (after - before) for before, after in itertools.pairwise(due_s)]
    assert statistics.fmean(gaps) == pytest.approx(1.0, rel=0.03)
    assert statistics.variance(gaps) == pytest.approx(variance, rel=0.1, abs=1e-6)


def test_onoff_sends_all_in_the_begin_of_each_period() -> None:
    due_s = Process("onoff", burstiness=4.0, period_s=2.0).due_s(Rate(50.0, 50.0), 40.0, "c")
    assert max(moment_s % 2.0 for moment_s in due_s) <= 0.5


@given(st.sampled_from(SHAPES), st.text(max_size=5))
def test_the_same_seed_gives_the_same_moments(shape: str, seed: str) -> None:
    process, rate = Process(shape), Rate(20.0, 40.0)
    assert process.due_s(rate, 2.0, seed) == process.due_s(rate, 2.0, seed)


def test_rates_and_durations_are_read() -> None:
    assert parse_rates("50") == [Rate(50.0, 50.0)]
    assert parse_rates("10,20.5") == [Rate(10.0, 10.0), Rate(20.5, 20.5)]
    assert parse_rates("10..100") == [Rate(10.0, 100.0)]
    for text in ("", "x", "0", "-1", "1..", "inf", "1,,2"):
        with pytest.raises(ValueError, match="no rate"):
            parse_rates(text)
    assert [parse_duration(text) for text in ("45", "1m30s", "2h", "0.5s")] == [45, 90, 7200, 0.5]


def test_levels_follow_each_other_with_pauses_and_a_warm_up_before() -> None:
    terms = Terms(shape="constant", rates=parse_levels("10,20"), duration_s=4.0, pause_s=1.5)
    plain = scheduled(terms)
    assert [(stage.begin_s, stage.rate_per_s) for stage in plain.stages] == [(0, 10), (5.5, 20)]
    assert Counter(shot.stage for shot in plain.shots) == {0: 40, 1: 80}
    assert Counter(shot.operation for shot in plain.shots) == {FAST: 90, SLOW: 30}
    warm = scheduled(replace(terms, warm_up_s=2.0))
    assert [stage.begin_s for stage in warm.stages] == [2.0, 7.5]
    assert [shot.stage for shot in warm.shots][:20] == [WARM_UP] * 20
    assert warm.length_s == 11.5


def test_a_level_ends_after_so_many_requests_or_its_time() -> None:
    terms = Terms(shape="constant", rates=parse_levels("10,20"), duration_s=math.inf, requests=15)
    schedule = scheduled(terms)
    assert Counter(shot.stage for shot in schedule.shots) == {0: 15, 1: 15}
    assert [stage.duration_s for stage in schedule.stages] == [1.5, 0.75]
    both = scheduled(replace(terms, duration_s=1.0))
    assert Counter(shot.stage for shot in both.shots) == {0: 10, 1: 15}
    assert [stage.duration_s for stage in both.stages] == [1.0, 0.75]
    # The first of what a longer test would send.
    drawn = replace(terms, shape="bursty", rates=parse_levels("10"))
    longer = scheduled(replace(drawn, requests=None, duration_s=90.0))
    assert scheduled(drawn).shots == longer.shots[:15]


def test_apart_gives_each_operation_every_level_for_itself() -> None:
    terms = Terms(shape="constant", rates=parse_levels("10,20"), duration_s=1.0, apart=True)
    schedule = scheduled(terms)
    assert [stage.only for stage in schedule.stages] == [FAST, SLOW, FAST, SLOW]
    for shot in schedule.shots:
        assert shot.operation == schedule.stages[shot.stage].only


def test_a_ramp_is_reported_in_parts() -> None:
    terms = Terms(shape="constant", rates=parse_levels("10..90"), duration_s=80.0)
    schedule = scheduled(terms)
    assert [stage.rate_per_s for stage in schedule.stages] == [15, 25, 35, 45, 55, 65, 75, 85]
    assert [*Counter(shot.stage for shot in schedule.shots)] == [*range(RAMP_PARTS)]
    for shot in schedule.shots:
        stage = schedule.stages[shot.stage]
        assert stage.begin_s <= shot.due_s < stage.begin_s + stage.duration_s


def test_senders_share_a_schedule_without_rest() -> None:
    schedule = scheduled(Terms(shape="poisson", rates=parse_levels("50"), duration_s=3.0))
    shares = [schedule.share(index, 3) for index in range(3)]
    assert sorted((shot for share in shares for shot in share), key=lambda shot: shot.turn) == [
        *schedule.shots
    ]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_trace_is_read_with_and_without_names_dates_and_packing(tmp_path: Path) -> None:
    days = ["2023-11-16 18:15:47.2805900,9,4", "2023-11-16 18:15:46.6805900,7,3"]
    dated = "\n".join(["TIMESTAMP,Context,Generated", *days, ""])
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(dated.encode()))
    first, second = read_trace(packed)
    assert first == Entry(0.0, 7, 3)
    assert second.at_s == pytest.approx(0.6)
    assert second.prompt_tokens == 9
    plain = tmp_path / "trace.csv"
    plain.write_text("10,1,2\n12.5,3,4\n", encoding="utf-8")
    assert read_trace(plain) == [Entry(0.0, 1, 2), Entry(2.5, 3, 4)]
    plain.write_text("10,1,2\n12,x,4\n", encoding="utf-8")
    with pytest.raises(TraceError, match="Line 2 of"):
        read_trace(plain)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_a_trace_is_stretched_to_a_rate_or_sped_up() -> None:
    entries = [Entry(float(second), 100, 50) for second in range(100)]
    sped = replay(entries, 10.0, speed=4.0, rate_per_s=None)
    assert [one.at_s for one in sped] == [second / 4 for second in range(40)]
    stretched = replay(entries, 10.0, speed=1.0, rate_per_s=5.0)
    assert [one.at_s for one in stretched] == pytest.approx([second / 5 for second in range(50)])
    terms = Terms(shape="replay", rates=parse_levels("5"), duration_s=4.0, length_scale=0.1)
    shots = scheduled(terms, tuple(entries)).shots
    assert [(shot.prompt_tokens, shot.output_tokens) for shot in shots] == [(10, 5)] * 20


@pytest.mark.parametrize(
    ("requests", "rate", "sent", "lasts_s"),
    [
        (None, "", 12, 2.0),
        (100, "", 12, 2.0),
        (12, "", 12, 2.0),
        (6, "", 6, 1.0),
        (3, "", 3, 1.0),  # all at once
        (12, "4", 12, 3.0),
        (None, "4", 12, 3.0),
    ],
)
def test_of_a_trace_every_request_is_sent_and_the_test_ends_with_it(
    requests: int | None, rate: str, sent: int, lasts_s: float
) -> None:
    entries = tuple(Entry(float(second), 10, 5) for second in range(3) for _ in range(4))
    terms = Terms(
        shape="replay", rates=parse_levels(rate), duration_s=30.0 if requests is None else math.inf
    )
    schedule = scheduled(replace(terms, requests=requests), entries)
    assert len(schedule.shots) == sent
    assert schedule.length_s == pytest.approx(lasts_s)
    assert schedule.stages[-1].duration_s == pytest.approx(lasts_s)
    short = scheduled(replace(terms, requests=None, duration_s=1.5), entries)
    assert (len(short.shots), short.length_s) == (6 if rate else 8, 1.5)
