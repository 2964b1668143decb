"""From outcomes to numbers, and from numbers to what is printed, drawn and kept."""

import csv
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.comparison import ComparisonError, compare, differences, main
from loadtest.mix import Operation
from loadtest.objective import parse_objective
from loadtest.outcomes import (
    Gauge,
    Generator,
    Health,
    Outcome,
    elapsed_s,
    group_failures,
    judge,
    write_requests,
)
from loadtest.page import Chart, Line, charts, draw_svg, keep, render_html
from loadtest.report import Report, build_report, read_report, render_json, summarise, timeline
from loadtest.schedule import Stage, Terms, parse_levels
from loadtest.tables import render_markdown, render_text, row_table, text_table, verdict_table
from loadtest.target import Ask

SLOW, FAST = Operation("generate", "talker", Ask(8)), Operation("generate", "talker", Ask(1))
UNSEEN = Operation("classify", "judge", Ask(4))
FREE = Operation("classify", "judge", Ask(deadline_ms=50.0))
WELL = Health(4, 4, 0.1, 0.2, 0.3, 0.1, 0.2, 1, ())


def outcomes() -> list[Outcome]:
    right = [
        Outcome(SLOW, 10.0 + i, 100.0 * (i + 1), None, 10.0 * (i + 1), (10.0,) * 10, 11)
        for i in range(4)
    ]
    wrong = [Outcome(SLOW, 11.0, 9000.0, "late <1>"), Outcome(FAST, 11.0, 1.0, "late <1>")]
    return [*right, *wrong, Outcome(FAST, 12.0, 5.0, None, 4.0, (), 1)]


def report(measured: list[Outcome], health: Health = WELL, objective: str = "") -> Report:
    return build_report(
        terms=Terms("http://127.0.0.1:1", "generate:*=1", objective=objective),
        users=3,
        objective=parse_objective(objective),
        operations=[SLOW, FAST, UNSEEN],
        stages=[Stage(0.0, elapsed_s(measured), None)],
        begin_s=10.0,
        outcomes=measured,
        health=health,
    )


def two_rates(slower: float = 1.0) -> Report:
    """An open loop of two rates; twice the rate takes twice as long."""
    measured = [
        Outcome(
            operation,
            *(100.0 * stage + at, (stage + 1.0) * (at % 10 + operation.place[2][0]) * slower),
            stage=stage,
            steps=operation.ask.steps,
            expected=0.5 + (operation.ask.steps or 0) / 20,
            metric="accuracy",
            correct=at % 5 > 0,
            lag_ms=0.2,
        )
        for stage in range(2)
        for at in range(90)
        for operation in (UNSEEN, Operation("classify", "judge", Ask(1)))
    ]
    free = [
        Outcome(FREE, float(at), 3.0, stage=0, steps=2.0 + at % 3, reason="deadline")
        for at in range(30)
    ]
    limits = "latency_p99_ms<20"
    terms = Terms(shape="poisson", rates=parse_levels("2,4"), duration_s=90, objective=limits)
    stages = [Stage(0.0, 90.0, 2.0), Stage(100.0, 90.0, 4.0)]
    asked = {one.operation for one in [*measured, *free]}
    operations = sorted(asked, key=lambda each: each.place)
    objective = parse_objective(limits)
    return build_report(terms, 1, objective, operations, stages, 0.0, [*measured, *free], WELL)


def kept(made: Report, folder: Path) -> None:
    folder.mkdir()
    (folder / "report.json").write_text(render_json(made), encoding="utf-8")


def test_each_operation_gets_a_row_of_its_right_answers() -> None:
    objective = parse_objective("latency_p99_ms<250")
    unseen, fast, slow = summarise(outcomes(), dict.fromkeys((SLOW, FAST, UNSEEN), 10.0), objective)
    assert (slow.requests, slow.errors, slow.good) == (5, 1, 2)
    assert (slow.p50_ms, slow.p95_ms, slow.p99_ms, slow.mean_ms) == (200.0, 400.0, 400.0, 250.0)
    assert (slow.first_token_p50_ms, slow.first_token_p95_ms) == (20.0, 40.0)
    assert slow.gap_p50_ms == 10.0
    assert (slow.per_token_p50_ms, fast.per_token_p99_ms) == (10.0, None)
    assert slow.stream_tokens_per_s == pytest.approx(100.0)
    # 44 tokens between the first request (10 s) and the last answer (20 s).
    assert slow.total_tokens_per_s == pytest.approx(4.4)
    assert slow.requests_per_s == pytest.approx(0.4)
    assert (fast.requests, fast.errors, fast.stream_tokens_per_s) == (2, 1, None)
    assert (unseen.requests, unseen.p50_ms, unseen.total_tokens_per_s) == (0, None, None)


def test_stages_tell_what_was_offered_answered_good_and_carried_over() -> None:
    made = two_rates()
    first, second = made.stages
    assert (first.offered_per_s, second.offered_per_s) == (210 / 90, 2.0)
    assert (first.carried, second.carried) == (0, 0)
    assert (first.met, second.met, made.passed) == (True, False, False)
    # Of steps=4 those of 6 to 9 are too slow at twice the rate; of steps=1 none is but 10.
    assert second.good_per_s == pytest.approx((54 + 81) / 90)
    free = next(row for row in first.rows if row.ask == str(FREE.ask))
    assert free.steps_used == {"2": 10, "3": 10, "4": 10}
    assert free.reasons == {"deadline": 30}
    judged = first.rows[-1] if first.rows[-1].known else first.rows[0]
    assert judged.accuracy == pytest.approx(0.8)
    assert judged.accuracy_interval is not None
    late = replace(outcomes()[0], operation=UNSEEN, started_s=80.0, total_ms=30_000.0)
    stages = [Stage(0.0, 90.0, 1.0), Stage(100.0, 90.0, 1.0)]
    terms = Terms(shape="constant", rates=parse_levels("1"))
    objective = parse_objective("")
    carried = build_report(terms, 1, objective, [UNSEEN], stages, 0.0, [late], WELL)
    assert [stage.carried for stage in carried.stages] == [0, 1]
    assert "still unanswered" in render_text(carried)


def test_a_test_with_an_error_or_without_an_answer_has_not_passed() -> None:
    assert not report(outcomes()).passed
    assert not report([]).passed
    assert report([Outcome(FAST, 10.0, 1.0)]).passed
    assert not report([Outcome(FAST, 10.0, 30.0)], objective="latency_p99_ms<20").passed
    failed = [Outcome(FAST, 10.0, 1.0, "refused"), *[Outcome(FAST, 10.0, 1.0)] * 99]
    assert report(failed, objective="error_share<0.02").passed


def test_the_table_shows_numbers_failures_and_gaps() -> None:
    printed = render_text(report(outcomes()))
    lines = printed.splitlines()
    assert lines[0].split()[:5] == ["endpoint", "model", "budget", "requests", "errors"]
    assert lines[2].split()[:6] == ["classify", "judge", "steps=4", "0", "0", "0.0"]
    assert "–" in lines[2]
    assert len({len(line) for line in lines[:5]}) == 1
    assert "2 ERRORS" in printed
    assert "1 × generate talker steps=8: late <1>" in printed
    assert "NOTHING WAS ANSWERED" in render_text(report([]))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fold_to_the_width_of_the_terminal_and_lose_nothing(width: int) -> None:
    made = two_rates()
    whole = row_table(made.rows)
    folded = text_table(whole, width)
    blocks = [block.splitlines() for block in folded.split("\n\n")]
    assert max(len(line) for block in blocks for line in block) <= width
    for block in blocks:
        assert block[0].split()[:3] == ["endpoint", "model", "budget"]
        assert len(block) == len(whole) + 1
    headings = [heading for block in blocks for heading in block[0].split()[3:]]
    assert headings == [*whole[0][3:]]
    assert (len(blocks) == 1) == (width == 120)
    assert "MISSED" in text_table(verdict_table(made), width)
    printed = render_text(made, width)
    assert max(map(len, printed.splitlines())) <= max(width, 70)  # of stages, three columns


def test_seconds_follow_the_moment_a_request_was_due() -> None:
    slices = timeline(outcomes(), 10.0)
    assert [one.due for one in slices][:4] == [1, 3, 2, 1]
    assert [one.answered for one in slices][:4] == [1, 1, 2, 1]
    assert slices[1].errors == 2
    assert slices[-1].at_s == 10.0


@pytest.mark.parametrize(
    ("lags_ms", "sent", "lost", "busiest", "says"),
    [
        ([0.1] * 98 + [30.0] * 2, 100, 0, 0.2, "sent more than 30 ms after they were due"),
        ([0.1] * 100, 100, 0, 0.97, "used 97% of a core"),
        ([0.1] * 90, 90, 0, 0.2, "10 of 100 planned requests were never sent"),
        ([0.1] * 100, 100, 1, 0.2, "1 of the processes that send were lost"),
    ],
)
def test_a_sender_that_did_not_keep_up_says_so_loudly(
    lags_ms: list[float], sent: int, lost: int, busiest: float, says: str
) -> None:
    good = judge([0.1] * 100, 100, 100, 0, [Generator(0.1, 0.2)], 10.0)
    assert not good.saturated
    bad = judge(lags_ms, 100, sent, lost, [Generator(0.1, 0.2), Generator(0.5, busiest)], 10.0)
    made = report([Outcome(FAST, 10.0, 1.0)], bad)
    assert says in render_text(made)
    assert "WARNING: THE SENDER WAS SATURATED" in render_text(made)
    assert 'class="warning"' in render_html(made)


def test_a_short_test_says_how_busy_its_sender_was_and_complains_of_nothing() -> None:
    short = judge([0.1] * 100, 100, 100, 0, [Generator(0.97, None)], 10.0)
    assert not short.saturated
    assert "a sender used 97% of a core." in render_text(report([Outcome(FAST, 10.0, 1.0)], short))
    busy = Gauge()
    while time.process_time() < busy._marks[0][1] + 0.05:
        pass
    assert busy.read().cpu_busiest is None and busy.read().cpu_mean > 0


def test_what_is_kept_can_be_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    keep(report(outcomes()), None, folder)
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert (record["requests"], record["errors"], record["users"]) == (7, 2, 3)
    assert record["rows"][2]["p50_ms"] == 200.0
    assert record["failures"][0]["operation"] == "generate talker steps=8"
    assert "| generate | talker | steps=8 | 5 | 1 |" in (folder / "report.md").read_text()
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_every_picture_is_drawn_and_the_page_needs_nothing_else() -> None:
    made = two_rates()
    titles = [chart.title for chart in charts(made)]
    assert titles == [
        "Latency against rate",
        "Throughput and goodput",
        "Second by second",
        "Quality against latency under load: judge",
        "Steps used",
    ]
    assert [chart.title for chart in charts(report(outcomes()))][:3] == [
        "Latency",
        "Time to first token",
        "Time between tokens",
    ]
    page = render_html(made)
    assert page.count("<svg") == len(titles)
    # Names of namespaces are no addresses that anything is loaded from.
    assert not re.search(r'(src|href)="(?!#)|url\((?!#)|@import|<script', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'href="#([^"]+)"', page)} <= {*ids}


def test_rates_below_one_a_second_have_names_of_their_own() -> None:
    made = two_rates()
    slow = zip(made.stages, (0.2, 0.4), strict=True)
    made = replace(made, stages=[replace(stage, rate_per_s=rate) for stage, rate in slow])
    (quality,) = (chart for chart in charts(made) if chart.title.startswith("Quality"))
    named = {line.label for line in quality.lines if line.label}
    assert named == {"classify, 0.2/s", "classify, 0.4/s"}


def test_the_page_escapes_what_a_server_said() -> None:
    page = render_html(report(outcomes()))
    assert "late &lt;1&gt;" in page
    assert "late <1>" not in page


def test_outcomes_survive_the_way_between_processes_and_into_a_table(tmp_path: Path) -> None:
    for outcome in outcomes():
        assert Outcome.from_wire(json.loads(json.dumps(outcome.to_wire()))) == outcome
    write_requests(outcomes(), tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["ask"] for row in rows].count("steps=8") == 5
    assert (rows[0]["total_ms"], rows[0]["gap_ms"], rows[0]["error"]) == ("100.0", "10.0", "")
    assert group_failures(outcomes())[0].count == 1


def test_two_tests_are_compared_stage_by_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(two_rates(), tmp_path / "a")
    kept(two_rates(slower=3.0), tmp_path / "b")
    changes = compare(read_report(tmp_path / "a"), read_report(tmp_path / "b"))
    halves = [each for each in changes if each.what == "p50 ms" and "steps=4" in each.operation]
    assert [each.rate_per_s for each in halves] == [2.0, 4.0]
    assert all(each.b == pytest.approx(3 * each.a) and each.differ for each in halves)
    accuracy = [each for each in changes if each.what == "accuracy"]
    assert accuracy and not any(each.differ for each in accuracy)
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c")]) == 0
    assert "3.000  surely" in capsys.readouterr().out
    assert len([*(tmp_path / "c").iterdir()]) == 4
    assert differences(read_report(tmp_path / "a"), read_report(tmp_path / "b")) == []


def test_tests_of_texts_of_other_lengths_are_told_apart(tmp_path: Path) -> None:
    chosen = Terms(max_tokens=8, prompt_tokens="16..32", labels="/data/films.tsv")
    kept(two_rates(), tmp_path / "a")
    kept(replace(two_rates(), texts=chosen.texts), tmp_path / "b")
    assert differences(read_report(tmp_path / "a"), read_report(tmp_path / "b")) == [
        "texts: A answers of at most 64 tokens, B answers of at most 8 tokens, "
        "prompts of 16..32 tokens, texts of films.tsv"
    ]


def test_what_cannot_be_compared_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(two_rates(), tmp_path / "a")
    kept(report(outcomes()), tmp_path / "b")
    with pytest.raises(ComparisonError, match="no operation in common"):
        compare(read_report(tmp_path / "a"), read_report(tmp_path / "b"))
    (tmp_path / "old.json").write_text('{"schema_version": 1}')
    assert main([str(tmp_path / "a"), str(tmp_path / "old.json")]) == 2
    assert "schema version 1, not 2" in capsys.readouterr().err


def test_failures_that_differ_in_numbers_only_are_one_kind() -> None:
    one = next(outcome for outcome in outcomes() if outcome.error is not None)
    late = [replace(one, error=f"HTTP 429 too_busy: {ms} ms after 0.{ms}") for ms in (5, 70)]
    other = replace(one, error="HTTP 503 draining: 5 ms")
    found = [(failure.message, failure.count) for failure in group_failures([*late, other])]
    assert found == [
        ("HTTP 429 too_busy: … ms after …", 2),
        ("HTTP 503 draining: 5 ms", 1),
    ]


def test_few_requests_are_not_taken_for_a_high_rate() -> None:
    terms = Terms(shape="constant", rates=parse_levels("1"))
    made = build_report(
        *(terms, 1, parse_objective(""), [FAST], [Stage(0.0, 10.0, 0.1)], 0.0),
        *([Outcome(FAST, 0.0, 5.0)], WELL),
    )
    assert made.rows[0].requests_per_s == pytest.approx(0.1)
    assert made.answered_per_s == pytest.approx(0.1)


@pytest.mark.parametrize(("answers", "warned"), [(99, True), (100, False)])
def test_percentiles_of_few_answers_come_with_a_warning(answers: int, warned: bool) -> None:
    made = report([Outcome(SLOW, 10.0 + i / 100, 5.0 + i, None) for i in range(answers)])
    for shown in (render_text(made), render_html(made), render_markdown(made)):
        assert ("operations have fewer than 100 right" in " ".join(shown.split())) is warned


def test_no_two_lines_of_a_picture_have_the_same_colour() -> None:
    names = [str(i) for i in range(12)]
    lines = [Line(name, name, [0.0, 1.0], [1.0, float(i)]) for i, name in enumerate(names)]
    drawn = draw_svg(Chart("Latency", "", "x", "y", lines))
    colours = set(re.findall(r"stroke: (#[0-9a-f]{6})", drawn)) - {"#d9dee7", "#1c2330"}
    assert len(colours) >= 12
