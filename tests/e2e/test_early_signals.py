"""Signals that come before the server listens."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.fixtures.tiny_bundles import build_classify
from tests.fixtures.tiny_folders import classify_bundle
from tests.server_process import server_process


def catches(process: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def started(*arguments: str) -> subprocess.Popen[str]:
    """A process that has hardly begun, and takes signals."""
    process = subprocess.Popen(
        [sys.executable, "-m", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end_s = time.monotonic() + 10
    while not catches(process.pid, signal.SIGHUP):
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.005)
    return process


@pytest.mark.parametrize("later_s", [0.0, 0.3, 1.0])
def test_sigterm_ends_the_start_well(later_s: float) -> None:
    process = started(str(classify_bundle().folder))
    time.sleep(later_s)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=15)
    assert process.returncode == 0 and err == ""
    assert out == "" or "Stepdial serves" in out


def test_sighup_while_it_starts_is_heeded_once_it_serves(tmp_path: Path) -> None:
    folder = build_classify(tmp_path / "one", name="one").folder
    with server_process([folder]) as server:  # it survives those that come later, too
        for _ in range(3):
            server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
    process = started(str(folder))
    try:
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, "it has ended"
            said += line
        process.send_signal(signal.SIGHUP)
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0
