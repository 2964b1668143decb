"""The runner of the benchmarks: what it runs, what it leaves out, and the page of the results."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.lab import RESULTS
from benchmarks.run import PAGE, SCRIPTS, read_results, render_page
from benchmarks.summary import QUESTIONS, summary
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle

BUNDLES = [str(generate_bundle().folder), str(classify_bundle().folder)]


def test_what_is_not_run_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    skipped = [name for name in SCRIPTS if name not in ("quality", "precision", "first_answer")]
    assert run.main(["--quick", "--bundles", *BUNDLES, "--skip", *skipped]) == 0
    printed = capfd.readouterr()
    assert "## Quality at each rung" in printed.out and "## What fewer bits" not in printed.out
    assert "left out, since it is never quick: first_answer" in printed.out
    assert "no bundle of another precision than fp32: make one with `stepdial" in printed.err
    assert "LEFT OUT, it lacks what it measures (see above): precision" in printed.err


def test_what_was_asked_for_by_name_must_be_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--quick", "--bundles", *BUNDLES, "--", "precision"]) == 1
    assert "FAILED, nothing was measured: precision" in capfd.readouterr().err


def test_run_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["dail"])
    assert "no benchmark is named dail: there are quality, precision" in capsys.readouterr().err


def test_run_fails_when_a_script_does(tmp_path: Path) -> None:
    arguments = ["--quick", "--bundles", str(tmp_path / "missing"), "--", "quality"]
    assert run.main(arguments) == 1


def test_the_page_is_what_the_results_say() -> None:
    """The published page."""
    shown = render_page(read_results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == shown, "run benchmarks/run.py --page"


def test_the_first_screen_answers_every_question_with_kept_figures() -> None:
    results = {result.name: result for result in read_results(RESULTS)}
    whole = summary(results)
    links = re.findall(r"^\| \[.*?\]\(#(.*?)\) \|", whole, re.MULTILINE)
    assert len(links) == len(QUESTIONS) and len(whole.splitlines()) <= 20
    headings = re.findall(r"^## (.*)$", render_page(results.values()), re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    assert set(links) <= names
    peers = results.pop("peers")
    asked = [one.asked for one in QUESTIONS if one.result == "peers"]
    assert asked and all(one in whole and one not in summary(results) for one in asked)
    changed = [
        [*row[:1], 77.7, *row[2:]] if row[0] == "stepdial" else row for row in peers.tables[0].rows
    ]
    table = replace(peers.tables[0], rows=changed)
    results["peers"] = replace(peers, tables=[table, *peers.tables[1:]])
    assert "| 77.7 requests a second within 100 ms;" in summary(results)
    assert summary({}) == ""
