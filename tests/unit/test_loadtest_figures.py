"""Figures of a report that people of other tools look for, and what must not be read into them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.comparison import compare
from loadtest.mix import Operation
from loadtest.objective import parse_objective
from loadtest.outcomes import Health, Outcome
from loadtest.page import render_html
from loadtest.report import Report, build_report, read_report, render_json, summarise
from loadtest.schedule import Stage, Terms, parse_levels
from loadtest.tables import render_text, row_table, stage_table
from loadtest.target import Ask

WELL = Health(4, 4, 0.1, 0.2, 0.3, 0.1, 0.2, 1, ())
SLOW, FAST = Operation("generate", "talker", Ask(8)), Operation("generate", "talker", Ask(1))


def stream(
    operation: Operation = SLOW,
    gaps_ms: tuple[float, ...] = (10.0,) * 10,
    total_ms: float = 120.0,
    stage: int = 0,
    held_ms: float = 0.0,
) -> Outcome:
    return Outcome(
        *(operation, 10.0 + 10 * stage, total_ms, None, 20.0, gaps_ms, len(gaps_ms) + 1),
        stage=stage,
        held_ms=held_ms,
    )


def report(measured: Sequence[Outcome], limits: str = "", in_flight: int | None = None) -> Report:
    terms = Terms(
        shape="poisson", rates=parse_levels("1,2"), objective=limits, max_in_flight=in_flight
    )
    stages = [Stage(0.0, 10.0, 1.0), Stage(10.0, 10.0, 2.0)]
    objective = parse_objective(limits)
    return build_report(terms, 1, objective, [SLOW, FAST], stages, 10.0, measured, WELL)


def test_time_per_output_token_is_one_figure_for_each_stream(tmp_path: Path) -> None:
    halting, even = stream(gaps_ms=(1.0,) * 99 + (101.0,)), stream()
    [row] = summarise([halting, even], {SLOW: 10.0}, parse_objective(""))
    assert (row.gap_p50_ms, row.gap_p99_ms) == (1.0, 10.0)
    assert (row.per_token_p50_ms, row.per_token_p95_ms, row.per_token_p99_ms) == (2.0, 10.0, 10.0)
    shown = dict(zip(*row_table([row]), strict=True))
    assert (shown["tpot p50"], shown["tpot p99"]) == ("2.00", "10.00")
    for name, slower in (("a", 1.0), ("b", 3.0)):
        made = report([stream(gaps_ms=(slower,) * 10)])
        (tmp_path / f"{name}.json").write_text(render_json(made), encoding="utf-8")
    changes = compare(read_report(tmp_path / "a.json"), read_report(tmp_path / "b.json"))
    told = {change.what: (change.a, change.b) for change in changes}
    assert told["tpot p50 ms"] == told["tpot p99 ms"] == (1.0, 3.0)


def test_goodput_is_never_more_than_throughput() -> None:
    made = report([stream(total_ms=90_000.0) for _ in range(3)])
    first = made.stages[0]
    assert made.good_per_s == made.answered_per_s == pytest.approx(3 / 90)
    assert first.good_per_s == first.answered_per_s == pytest.approx(3 / 90)
    assert next(row for row in first.rows if row.requests).good_per_s == pytest.approx(3 / 90)
    assert "0.0 right answers per second" in render_text(made)


def test_what_is_late_in_one_stage_and_in_the_next_takes_its_time_once() -> None:
    """2 a second are due for 20 s; one a second is answered, so the last after 40 s."""
    late = [
        replace(stream(total_ms=1000.0 + 500.0 * at, stage=at // 20), started_s=10.0 + at / 2)
        for at in range(40)
    ]
    made = report(late)
    assert [stage.answered_per_s for stage in made.stages] == pytest.approx([20 / 20, 20 / 30])
    assert made.answered_per_s == made.good_per_s == pytest.approx(1.0)
    assert made.rows[-1].requests_per_s == pytest.approx(1.0)


def test_what_is_said_of_a_whole_stage_stands_once() -> None:
    measured = [
        stream(operation, total_ms=100.0 * (stage + 1), stage=stage)
        for stage in (0, 1)
        for operation in (SLOW, FAST)
    ]
    cells = stage_table(report(measured, "latency_p99_ms<150"))
    at = list(cells[0]).index("objective")
    assert [row[at] for row in cells[1:]] == ["met", "", "MISSED", ""]


def test_requests_that_waited_for_a_place_are_told() -> None:
    made = report([stream(held_ms=50.0 * at) for at in range(7)], in_flight=2)
    assert (made.held, made.held_max_ms) == (6, 300.0)
    for shown in (render_text(made), render_html(made)):
        assert "At most 2 requests were in flight at a time: 6 of 7 waited" in shown
    free = report([stream()])
    assert (free.held, free.held_max_ms) == (0, None)
    assert "in flight at a time" not in render_text(free)
