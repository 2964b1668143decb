"""The runner of the benchmarks: what it runs, what it leaves out, and the page of the results."""

from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.run import SCRIPTS, read_results, render_page
from tests.tiny_folders import classify_bundle, generate_bundle

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
    """The published page; there is one as soon as there are results."""
    root = Path(__file__).resolve().parent.parent.parent / "benchmarks"
    results = read_results(root / "results")
    page = root / "RESULTS.md"
    assert page.is_file() == bool(results)
    if results:
        assert page.read_text(encoding="utf-8") == render_page(results), (
            "run benchmarks/run.py --page"
        )
