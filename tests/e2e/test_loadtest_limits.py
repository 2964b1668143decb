"""Tests that end after so many requests, callers who think, and a limit of requests under way."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest_stub import Stub, running_stub

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LENIENT = ("--max-lag-ms", "2000")  # other processes of a busy machine may delay a sender


def report(stub: Stub, kept: Path, *options: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "stepdial", "loadtest", "--url", stub.url]
    done = subprocess.run(
        [*command, "--mix", "classify:1", *LENIENT, *options, "--out", str(kept)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = kept if kept.is_file() else kept / "report.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record, done.stdout


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_a_closed_loop_ends_after_so_many_requests(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    flags = ("--requests", "25", "--users", "3", "--warm-up", "0.3", *workers)
    flags += ("--mix", "generate-whole:1")
    with running_stub(service_s=0.02) as stub:
        record, said = report(stub, tmp_path / "report.json", *flags)
        sent = len(stub.bodies)
        written = [body["seed"] for body in stub.bodies]
    assert len({*written}) == len(written), "no process sends what another has sent"
    assert record["requests"] == 25
    assert sent > 25, "the warm-up comes before"
    assert "25 requests" in said and not record["ended_early"]


def test_callers_think_between_an_answer_and_the_next_question(tmp_path: Path) -> None:
    flags = ("--requests", "9", "--users", "3", "--think-time", "0.5")
    began_s = time.monotonic()
    with running_stub() as stub:
        record, said = report(stub, tmp_path / "report.json", *flags)
    assert record["requests"] == 9
    # Three each: nobody thinks after the last.
    assert 1.0 <= record["elapsed_s"] < time.monotonic() - began_s
    assert "then thinks 0.5 s" in said
    # What they think is no latency.
    assert record["rows"][0]["p50_ms"] < 500


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_a_limit_of_requests_under_way_is_kept_and_its_waits_are_latency(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    # Ten a second more than the server can: what is due waits behind the limit.
    flags = ("--shape", "constant", "--rate", "30", "--requests", "45", "--keep-requests")
    with running_stub(service_s=0.05) as stub:
        folder = tmp_path / "report"
        record, said = report(stub, folder, *flags, "--max-in-flight", "2", *workers)
    with (folder / "requests.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == record["requests"] == 45
    begun = [
        float(row["started_s"]) + (float(row["lag_ms"]) + float(row["held_ms"])) / 1e3
        for row in rows
    ]
    ended = [float(row["started_s"]) + float(row["total_ms"]) / 1e3 for row in rows]
    for at in begun:
        under_way = sum(began <= at < end for began, end in zip(begun, ended, strict=True))
        assert under_way <= 2 + len(workers), "clocks of processes differ a little"
    # 45 requests take the server 2.25 s, and the last was due after 1.5 s.
    assert record["held_max_ms"] > 400
    assert record["held"] > 20
    assert record["rows"][0]["curve_ms"][-1] > record["held_max_ms"]
    assert "At most 2 requests were in flight at a time" in said
    assert "at most 2 in flight at a time; 45 requests" in said
