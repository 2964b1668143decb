"""From outcomes to numbers, and from numbers to what is printed and kept."""

import json
from pathlib import Path

import pytest

from loadtest.mix import Operation
from loadtest.outcomes import Outcome, elapsed_s, group_failures, percentile, summarise
from loadtest.report import Report, render_html, render_text, write_report

SLOW, FAST = Operation("generate", "talker", 8), Operation("generate", "talker", 1)
UNSEEN = Operation("classify", "judge", 4)


def outcomes() -> list[Outcome]:
    right = [
        Outcome(SLOW, 10.0 + i, 100.0 * (i + 1), None, 10.0 * (i + 1), 11, 100.0 + i)
        for i in range(4)
    ]
    wrong = [Outcome(SLOW, 11.0, 9000.0, "late <1>"), Outcome(FAST, 11.0, 1.0, "late <1>")]
    return [*right, *wrong, Outcome(FAST, 12.0, 5.0, None, 4.0, 1)]


def report(measured: list[Outcome]) -> Report:
    return Report(
        url="http://127.0.0.1:1",
        users=3,
        mix="generate:*=1",
        elapsed_s=elapsed_s(measured),
        rows=summarise(measured, [SLOW, FAST, UNSEEN]),
        failures=group_failures(measured),
    )


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    assert percentile([7.0], 1) == 7.0
    assert percentile([], 50) is None


def test_each_operation_gets_a_row_of_its_right_answers() -> None:
    unseen, fast, slow = summarise(outcomes(), [SLOW, FAST, UNSEEN])
    assert (slow.requests, slow.errors) == (5, 1)
    assert (slow.p50_ms, slow.p95_ms, slow.p99_ms) == (200.0, 400.0, 400.0)
    assert (slow.first_token_p50_ms, slow.first_token_p95_ms) == (20.0, 40.0)
    assert slow.stream_tokens_per_s == pytest.approx(101.5)
    # 44 tokens between the first request (10 s) and the last answer (20 s).
    assert slow.total_tokens_per_s == pytest.approx(4.4)
    assert slow.requests_per_s == pytest.approx(0.4)
    assert (fast.requests, fast.errors, fast.stream_tokens_per_s) == (2, 1, None)
    assert (unseen.requests, unseen.p50_ms, unseen.total_tokens_per_s) == (0, None, None)


def test_a_test_with_an_error_or_without_an_answer_has_not_passed() -> None:
    assert not report(outcomes()).passed
    assert not report([]).passed
    assert report([Outcome(FAST, 0.0, 1.0)]).passed


def test_the_table_shows_numbers_failures_and_gaps() -> None:
    printed = render_text(report(outcomes()))
    lines = printed.splitlines()
    assert lines[0].split()[:5] == ["endpoint", "model", "steps", "requests", "errors"]
    assert lines[2].split()[:6] == ["classify", "judge", "4", "0", "0", "0.0"]
    assert "–" in lines[2]
    assert len({len(line) for line in lines[:5]}) == 1
    assert "2 ERRORS" in printed
    assert "1 × generate talker steps=8: late <1>" in printed
    assert "NOTHING WAS ANSWERED" in render_text(report([]))


def test_what_is_kept_can_be_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_report(report(outcomes()), folder)
    record = json.loads((folder / "report.json").read_text())
    assert (record["requests"], record["errors"], record["users"]) == (7, 2, 3)
    assert record["rows"][2]["p50_ms"] == 200.0
    assert record["failures"][0]["operation"] == {
        "endpoint": "generate",
        "model": "talker",
        "steps": 8,
    }
    assert "| generate | talker | 8 | 5 | 1 |" in (folder / "report.md").read_text()


def test_the_page_escapes_what_a_server_said() -> None:
    page = render_html(report(outcomes()))
    assert "late &lt;1&gt;" in page
    assert "late <1>" not in page


def test_outcomes_survive_the_way_between_processes() -> None:
    for outcome in outcomes():
        assert Outcome.from_wire(json.loads(json.dumps(outcome.to_wire()))) == outcome
