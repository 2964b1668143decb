"""The load test as people run it: the real command, first against a stub that can go wrong."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from loadtest.target import ENDPOINTS
from tests.e2e.browser import served
from tests.fixtures.tiny_bundles import STEPS, build_classify, build_generate
from tests.loadtest_stub import LADDER, UNHURRIED_S, running_stub
from tests.server_process import free_port

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def run(url: str, *options: str, duration: str = "2s") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepdial", "loadtest", "--url", url, "--users", "3"]
    command += ["--duration", duration, "--max-tokens", "8", "--timeout", "1", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_every_rung_is_loaded_measured_and_reported(tmp_path: Path) -> None:
    with running_stub(service_s=UNHURRIED_S) as stub:
        done = run(stub.url, "--out", str(tmp_path / "report.json"))
        asked = {(body["model"], body["steps"]) for body in stub.bodies}
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked == {(model, steps) for model in ("talker", "judge") for steps in LADDER}
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["errors"] == 0
    assert record["requests"] == len(stub.bodies)
    assert len(record["rows"]) == 4
    for row in record["rows"]:
        assert row["requests"] > 0
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        if row["endpoint"] == "generate":
            assert 0 < row["first_token_p50_ms"] < row["p50_ms"]
            # The stub pauses 1 ms after each token.
            assert 0 < row["stream_tokens_per_s"] < 1000
    assert "no errors" in done.stdout


def test_the_real_server_answers_every_rung_rightly(tmp_path: Path) -> None:
    folders = [tmp_path / "writer", tmp_path / "critic"]
    build_generate(folders[0], name="writer")
    build_classify(folders[1], name="critic")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b"}\nb a\n', encoding="utf-8")
    writing = [name for name, endpoint in ENDPOINTS.items() if endpoint.task == "generate"]
    mix = ",".join(f"{name}:*" for name in ("classify", *writing))
    with served(folders) as server:
        flags = ("--mix", mix, "--prompts", str(prompts), "--max-tokens", "4")
        done = run(server.url, *flags, "--out", str(tmp_path / "report.json"), duration="3s")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "report.json").read_text())
    measured = {(row["endpoint"], row["steps"]): row for row in record["rows"] if row["requests"]}
    assert measured.keys() == {(name, step) for name in ("classify", *writing) for step in STEPS}
    assert record["errors"] == 0
    # A stream has as many tokens as its whole answer says: none is taken for one that is none.
    assert {row["tokens"] for (name, _), row in measured.items() if name in writing} == {4}


def test_a_wrong_answer_is_an_error_of_its_rung_alone() -> None:
    faults = {
        5: ("other_steps", "asked for steps=5, the answer says 99 steps"),
        6: ("refuse", "HTTP 429 queue_full: try later"),
        7: ("error_event", "the stream ended with an error"),
        8: ("no_terminal", "the stream broke off after 8 tokens"),
        9: ("cut", "HTTPParseError: Incomplete response"),
        10: ("hang", "timed out"),
    }
    with running_stub({steps: fault for steps, (fault, _) in faults.items()}) as stub:
        done = run(stub.url, "--mix", "generate:*=1")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = {line.split()[2]: line.split() for line in lines if line.startswith("generate  talker")}
    for steps in LADDER:
        assert int(rows[f"steps={steps}"][3]) > 0
        assert int(rows[f"steps={steps}"][4]) == 0
    for steps, (_, says) in faults.items():
        assert int(rows[f"steps={steps}"][3]) == int(rows[f"steps={steps}"][4]) > 0
        named = [line for line in lines if f" × generate talker steps={steps}: " in line]
        assert len(named) == 1 and says in named[0], done.stdout


def test_the_mix_sets_the_shares() -> None:
    with running_stub() as stub:
        done = run(stub.url, "--mix", "classify:1=3,classify:4=1")
        steps = [body["steps"] for body in stub.bodies]
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps.count(1) / len(steps) == pytest.approx(0.75, abs=0.05)


def test_an_interrupt_still_reports() -> None:
    with running_stub() as stub:
        command = [sys.executable, "-m", "stepdial", "loadtest", "--url", stub.url]
        process = subprocess.Popen(
            [*command, "--duration", "1h", "--max-tokens", "8"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            while len(stub.bodies) < 50:
                assert process.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
            printed, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, printed
    assert "no errors" in printed


def run_by_locust(url: str, *flags: str) -> str:
    """What Locust prints of the file, in two processes that send."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
    done = subprocess.run(
        [*command, "--host", url, "--processes", "2", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_locust_runs_the_file_by_itself_in_several_processes() -> None:
    with running_stub(service_s=UNHURRIED_S) as stub:
        flags = ["-u", "4", "-r", "4", "-t", "2s", "--max-tokens", "8", "--stop-timeout", "5"]
        printed = run_by_locust(stub.url, *flags)
        sent = len(stub.bodies)
    assert f"{sent} requests in" in printed


def test_a_schedule_begins_once_locust_has_started_every_sender() -> None:
    with running_stub() as stub:
        flags = ["-u", "2", "-r", "0.25", "--expect-workers", "2", "--rate", "20"]
        flags += ["--duration", "1s", "--mix", "classify:*", "--max-lag-ms", "1000"]
        assert "SATURATED" not in run_by_locust(stub.url, *flags)


def test_callers_end_with_the_test_though_answers_never_come() -> None:
    with running_stub(dict.fromkeys(LADDER, "hang")) as stub:
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
        command += ["--host", stub.url, "-u", "3", "-r", "3", "-t", "1s", "--max-tokens", "8"]
        # Nothing says how long Locust may wait for them, so it ends them at once.
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
        sent = len(stub.bodies)
    assert sent == 3, "each has one, and none begins another when it is ended"
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{sent} requests in" in done.stdout
    assert "no answer before the end of the test" in done.stdout


def test_the_page_starts_a_test_and_shows_its_report() -> None:
    with running_stub() as stub:
        command = [sys.executable, "-m", "stepdial", "loadtest", "--url", stub.url, "--web"]
        port = free_port()
        process = subprocess.Popen(
            [*command, "--web-port", str(port), "--max-tokens", "8"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            page = f"http://127.0.0.1:{port}"
            fetch_when_up(f"{page}/steps")
            form = {"user_count": 2, "spawn_rate": 2, "host": stub.url, "mix": "classify:4=1"}
            urllib.request.urlopen(f"{page}/swarm", urllib.parse.urlencode(form).encode()).close()
            while len(stub.bodies) < 20:
                time.sleep(0.05)
            shown = fetch_when_up(f"{page}/steps")
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert 'judge</td><td class="left">steps=4</td>' in shown
    assert "talker</td>" not in shown


def fetch_when_up(url: str, patience_s: float = 20.0) -> str:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                text: str = response.read().decode()
                return text
        except OSError:
            assert time.monotonic() < deadline_s, f"{url} never answered"
            time.sleep(0.1)
