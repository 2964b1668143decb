"""Damaged bundles: refused by name or harmless after an accident; no crash when hashes fit again.

A sample of what `python -m benchmarks.corruption` does a thousand times.
"""

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.corruption import BundleOpener, attempt, judge
from serve.bundle import LATENCY_FILE, MANIFEST_FILE, SCHEMA_VERSION, BundleError, read_bundle

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / f"version-{SCHEMA_VERSION}"
NAMES = ("decoder-int8", "text", "points", "translator")
SEED, CASES = 1, 40


def test_a_damaged_bundle_is_refused_or_harmless_and_never_kills() -> None:
    cases, peak_kib = attempt([GOLDEN / name for name in NAMES], SEED, range(CASES))
    assert [case for case in cases if case.ending == "FAILED"] == []
    assert {case.resealed for case in cases} == {True, False}
    assert {case.ending for case in cases if not case.resealed} <= {"refused", "same answers"}
    assert 0 < peak_kib < 1 << 20


def test_a_process_that_dies_of_a_bundle_is_replaced(tmp_path: Path) -> None:
    with BundleOpener() as opener:
        sound = opener.open(GOLDEN / "text")
        opener.kill()
        assert opener.open(GOLDEN / "text") == {"outcome": "died", "message": "ended by SIGKILL"}
        assert opener.open(GOLDEN / "text")["answer"] == sound["answer"]
        assert opener.open(tmp_path / "absent")["outcome"] == "refused"


def test_what_counts_as_failed() -> None:
    died = {"outcome": "died", "message": "ended by SIGSEGV"}
    assert judge(died, "a", resealed=True) == ("FAILED", "ended by SIGSEGV")
    assert judge({"outcome": "answered", "answer": "b"}, "a", resealed=False)[0] == "FAILED"
    assert judge({"outcome": "answered", "answer": "b"}, "a", resealed=True)[0] == "other answers"
    nameless = {"outcome": "refused", "message": "no", "named": False, "stage": "loading"}
    assert judge(nameless, "a", resealed=False)[0] == "FAILED"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "text", tmp_path / "bundle"))


def test_a_pipe_is_not_waited_for(copied: Path) -> None:
    (copied / LATENCY_FILE).unlink()
    os.mkfifo(copied / LATENCY_FILE)
    with pytest.raises(BundleError, match="is no file; measure the latency again"):
        read_bundle(copied)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"schema_version": 2, "name": "\\ud800"}', "seal is missing or wrong"),
        ('{"schema_version": 2, "card": ' + "[" * 900 + "]" * 900 + "}", "manifest.json: "),
    ],
    ids=["half a character", "deep"],
)
def test_what_json_can_hold_and_a_seal_cannot(copied: Path, text: str, problem: str) -> None:
    (copied / MANIFEST_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match=problem):
        read_bundle(copied)
