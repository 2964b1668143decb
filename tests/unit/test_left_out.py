"""Page tests are never left out in silence: a run without a browser says which, at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_tests(of: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "STEPDIAL_CHROMIUM"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", of],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
def test_without_a_browser_the_page_tests_are_named(tmp_path: Path) -> None:
    done = run_tests("tests/e2e/test_page.py", PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PAGE TESTS LEFT OUT: NO CHROMIUM FOUND" in done.stdout
    named = [line for line in done.stdout.splitlines() if line.startswith("left out: ")]
    assert len(named) > 5
    assert all("tests/e2e/test_page.py::" in line for line in named)
    assert f"{len(named)} skipped" in done.stdout.splitlines()[-1]


def test_a_named_browser_that_is_not_there_is_an_error() -> None:
    # Of any tests: those of the page only take longer to be found.
    done = run_tests("tests/unit/test_pace.py", STEPDIAL_CHROMIUM="/nowhere/chromium")
    assert done.returncode != 0
    assert "STEPDIAL_CHROMIUM names /nowhere/chromium, which is no file" in done.stderr
