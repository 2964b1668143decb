"""What is measured of a run on held-out data, and how it is shown."""

import dataclasses
import errno
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from tests.fixtures.tiny_runs import tiny_label_run, tiny_point_recipe, trained
from train.__main__ import main
from train.checkpoint import load_run
from train.data import open_dataset
from train.evaluate import Range, Report, Row, evaluate_run, methods_named
from train.evaluation_report import plot_quality, print_report, write_json
from train.quality import Stability
from train.tally import Gain, Quality


def test_evaluation_reports_every_rung_with_its_interval(tmp_path: Path) -> None:
    report = evaluate_run(tiny_label_run(tmp_path), [1, 2, 4])
    rows = report.rows
    assert [row.steps for row in rows] == [1, 2, 4]
    # One step of size 1 goes as far as its velocity, of tokens that are no padding.
    assert rows[0].displacements == pytest.approx((rows[0].quality.cost ** 0.5,), rel=1e-4)
    best = max(rows, key=lambda row: (row.quality.value, -(row.steps or 0)))
    found = report.ranges["euler"]
    assert (found.first, found.best) == (1, best.steps)
    assert found.gain.better == pytest.approx(best.quality.value - rows[0].quality.value)
    for quality in (row.quality for row in rows):
        assert quality.metric == "accuracy" and quality.samples == 510
        assert quality.macro_f1 is not None and 0 < quality.macro_f1 <= 1
        assert 0 <= quality.low <= quality.value <= quality.high <= 1
        assert quality.cost > 0


def test_a_report_names_the_method_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stepped = evaluate_run(tiny_label_run(tmp_path), [1])
    print_report(stepped)
    print_report(dataclasses.replace(stepped, discrete=True))
    titles = [line for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    name = stepped.name
    assert titles == [f"{name}, euler, held-out data", f"{name}, held-out data"]


def test_a_way_that_is_named_twice_is_measured_once(tmp_path: Path) -> None:
    once, twice = (
        evaluate_run(tiny_label_run(tmp_path), steps, methods).rows
        for steps, methods in (([2], ["euler"]), ([2, 2], ["euler", "euler"]))
    )
    assert once == twice and methods_named("rk4,euler,rk4") == ["rk4", "euler"]


def test_a_last_batch_of_fewer_rows_weighs_as_much_as_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tiny_point_recipe(tmp_path, "optim.iterations=2", "data.held_out=0.2"), tmp_path)
    report = evaluate_run(run, [2])
    (whole,) = report.rows
    classes = Counter(
        int(one)
        for batch in open_dataset(load_run(run).recipe).held_out(5)
        for one in batch.targets
    )
    assert report.chance == max(classes.values()) / 16 > min(classes.values()) / 16
    monkeypatch.setattr("train.evaluate.rows_at_once", lambda recipe, sizes: 15)  # of 16
    (parts,) = evaluate_run(run, [2]).rows
    assert parts.quality.samples == whole.quality.samples == 16 and parts.nfe == whole.nfe == 2
    assert parts.gap == pytest.approx(whole.gap, rel=1e-4) and parts.gap > 0
    assert parts.displacements == pytest.approx(whole.displacements, rel=1e-4)
    assert parts.quality.loss == pytest.approx(whole.quality.loss, rel=1e-5)
    assert parts.quality.cost == pytest.approx(whole.quality.cost, rel=1e-4)


def row(steps: int, value: float, whole: float | None = None, method: str = "euler") -> Row:
    quality = Quality("accuracy", value, value - 0.1, value + 0.05, 50, 1.0, 0.0, whole)
    return Row(method, steps, steps, quality, 0.0, (), 1.0)


def report_of(*rows: Row, better: float = 0.3, half: float = 0.1) -> Report:
    stable = Stability(0.1, 1.0, 1.0, 0.1, 0.1)
    ranges = {"euler": Range(1, 4, Gain(better, half))}
    return Report("made", 4, False, rows, {}, stable, (), chance=0.5, ranges=ranges)


@pytest.mark.parametrize(
    ("values", "better", "half", "said", "warned"),
    [
        ((0.55, 0.8), 0.25, 0.1, "range: 4 steps are better than 1 step by 0.2500 ± 0.1000", False),
        ((0.55, 0.58), 0.03, 0.1, "1 step is enough here: no count is better beyond chance", True),
        ((0.55, 0.58), 0.03, math.inf, "one row was measured: too few to tell step counts", True),
    ],
)
def test_a_report_says_what_more_steps_buy_and_whether_any_is_better_than_chance(
    values: tuple[float, float],
    better: float,
    half: float,
    said: str,
    warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row(steps, value) for steps, value in zip((1, 4), values, strict=True)]
    print_report(report_of(*rows, better=better, half=half))
    printed = capsys.readouterr().out
    assert said in printed and ("WARNING: at chance" in printed) == warned


def test_whole_rows_are_those_of_the_method_above(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report_of(row(1, 0.6, 0.1), row(4, 0.9, 0.7), row(4, 0.9, 0.8, "heun")))
    lines = [line for line in capsys.readouterr().out.splitlines() if "in all positions" in line]
    assert [line.partition(": ")[2] for line in lines] == ["10.0 % / 70.0 %", "80.0 %"]


def test_the_macro_f1_of_a_classifier_is_below_its_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row(1, 0.6), row(4, 0.9), row(4, 0.9, method="heun")]
    scored = [
        dataclasses.replace(one, quality=dataclasses.replace(one.quality, macro_f1=value))
        for one, value in zip(rows, (0.5, 0.75, 0.8), strict=True)
    ]
    print_report(report_of(*scored))
    lines = [line for line in capsys.readouterr().out.splitlines() if "F1" in line]
    assert lines == ["macro F1: 0.5000 / 0.7500", "macro F1: 0.8000"]
    print_report(report_of(*rows))
    assert "F1" not in capsys.readouterr().out


def test_an_interval_without_ends_is_null_in_json(tmp_path: Path) -> None:
    write_json(report_of(row(1, 0.6), half=math.inf), tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["ranges"]["euler"]["gain"] == {"better": 0.3, "half": None}


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root writes anywhere
    assert main(["evaluate", "no run", option, str(tmp_path / "a.png")]) == 2
    assert "a.png cannot be written: name another file" in capsys.readouterr().err


def test_a_run_is_evaluated_whole_where_no_plot_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(report: Report, path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("train.evaluation_report.plot_quality", refuse)
    monkeypatch.setattr("train.text_quality.check_texts", lambda *_: None)
    monkeypatch.setattr("train.text_quality.print_texts", lambda *_: print("texts"))
    monkeypatch.setattr("train.evaluate.evaluate_run", lambda *_, **__: report_of(row(1, 0.5)))
    assert main(["evaluate", str(tmp_path), "--texts"]) == 2
    told = capsys.readouterr()
    assert told.out.endswith("texts\n")
    assert told.err.startswith(f"no plot: {tmp_path}/quality") and "--plot" in told.err


def test_a_plot_has_the_intervals_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[list[float], list[float], list[list[float]]]] = []

    def noted(
        _: Axes, x: list[float], y: list[float], yerr: list[list[float]], **__: object
    ) -> None:
        drawn.append((x, y, yerr))

    monkeypatch.setattr(Axes, "errorbar", noted)
    plot_quality(report_of(row(1, 0.6), row(4, 0.9)), tmp_path / "quality.png")
    ((x, y, (below, above)),) = drawn
    assert (x, y) == ([1, 4], [0.6, 0.9])
    assert below == pytest.approx([0.1, 0.1]) and above == pytest.approx([0.05, 0.05])
