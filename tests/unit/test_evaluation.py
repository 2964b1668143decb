"""What is measured of a run on held-out data, and how it is shown."""

import dataclasses
from pathlib import Path

import pytest

from tests.fixtures.tiny_runs import tiny_label_run, tiny_point_recipe, trained
from train.evaluate import evaluate_run, methods_named
from train.evaluation_report import print_report


def test_evaluation_reports_every_rung_with_its_interval(tmp_path: Path) -> None:
    rows = evaluate_run(tiny_label_run(tmp_path), [1, 2, 4]).rows
    assert [row.steps for row in rows] == [1, 2, 4]
    for quality in (row.quality for row in rows):
        assert quality.metric == "accuracy" and quality.samples == 510
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
    (whole,) = evaluate_run(run, [2]).rows
    monkeypatch.setattr("train.evaluate.rows_at_once", lambda recipe, sizes: 15)  # of 16
    (parts,) = evaluate_run(run, [2]).rows
    assert parts.quality.samples == whole.quality.samples == 16 and parts.nfe == whole.nfe == 2
    assert parts.gap == pytest.approx(whole.gap, rel=1e-4) and parts.gap > 0
    assert parts.displacements == pytest.approx(whole.displacements, rel=1e-4)
    assert parts.quality.loss == pytest.approx(whole.quality.loss, rel=1e-5)
    assert parts.quality.cost == pytest.approx(whole.quality.cost, rel=1e-4)
