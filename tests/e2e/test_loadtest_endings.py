"""How a load test ends: whoever ends it, and whatever is on its way, what was seen is told."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest_stub import LADDER, UNHURRIED_S, running_stub
from tests.waiting import wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
wait_for = partial(wait_until, most_s=40)
LENIENT = ("--max-lag-ms", "2000")  # other processes of a busy machine may delay a sender
HANGING = dict.fromkeys(LADDER, "hang")


@contextmanager
def started(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stepdial", "loadtest", "--url", url, *options]
    process = subprocess.Popen(
        [*command, "--mix", "classify:1", *LENIENT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()


def workers_of(parent: int) -> list[int]:
    """The processes that a process has started, as Linux lists them."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    return [int(each) for each in children.split()]


def kept(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def test_answers_that_workers_wait_for_at_the_end_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ("--users", "3", "--workers", "2", "--duration", "3s", "--out", str(file))
    with running_stub(service_s=0.7) as stub, started(stub.url, *flags) as test:
        printed, said = test.communicate(timeout=60)
        sent = len(stub.bodies)
    assert test.returncode == 0, printed + said
    # Each of three waits for the two before it: two seconds, which Locust would not wait.
    assert kept(file)["requests"] == sent > 3


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, ()), (signal.SIGINT, ("--workers", "2"))]
)
def test_an_interrupted_open_loop_reports_what_there_was(
    number: signal.Signals, workers: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    flags = ["--shape", "constant", "--rate", "40", "--duration", "10m", "--warm-up", "0.2"]
    flags += ["--objective", "latency_p50_ms<0.001", "--out", str(file), *workers]
    with running_stub() as stub, started(stub.url, *flags) as test:
        wait_for(lambda: len(stub.bodies) > 60)
        test.send_signal(number)
        printed, said = test.communicate(timeout=60)
        sent = len(stub.bodies)
    record = kept(file)
    assert test.returncode == 1, "the objective was missed"
    assert record["health"]["sent"] == record["health"]["planned"] == sent
    assert record["errors"] == 0
    assert record["stages"][0]["offered_per_s"] == pytest.approx(40.0, rel=0.1)
    assert record["ended_early"] and "ended early" in printed
    assert "Traceback" not in said and "KeyboardInterrupt" not in said, said


@pytest.mark.parametrize(("rate", "workers"), [(("--rate", "20"), ()), ((), ("--workers", "2"))])
def test_a_second_interrupt_waits_for_no_answer(
    rate: tuple[str, ...], workers: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    flags = ("--duration", "10m", "--users", "2", "--out", str(file), *workers, *rate)
    with running_stub(HANGING) as stub, started(stub.url, *flags) as test:
        wait_for(lambda: len(stub.bodies) > 1)
        assert test.stderr is not None
        test.send_signal(signal.SIGINT)
        said = ""
        while "Interrupted: waiting for answers" not in said:
            line = test.stderr.readline()
            assert line, said
            said += line
        test.send_signal(signal.SIGINT)
        test.wait(timeout=20)  # less than the answers would take
        said += test.stderr.read()
        sent = len(stub.bodies)
    assert kept(file)["requests"] == kept(file)["errors"] == sent
    assert "Traceback" not in said, said


def test_a_test_that_was_interrupted_before_it_began_leaves_nothing_behind() -> None:
    with running_stub() as stub, started(stub.url, "--workers", "2") as test:
        wait_for(lambda: any(map(workers_of, workers_of(test.pid))))
        [locust] = workers_of(test.pid)
        left = [locust, *workers_of(locust)]
        test.send_signal(signal.SIGTERM)
        _, said = test.communicate(timeout=30)
    assert test.returncode not in (0, 1)
    assert "Traceback" not in said, said
    wait_for(lambda: not any(Path(f"/proc/{each}/exe").exists() for each in left), most_s=5)


@pytest.mark.parametrize("killed", [1, 2])
def test_an_open_loop_ends_though_workers_were_killed(tmp_path: Path, killed: int) -> None:
    file = tmp_path / "report.json"
    flags = ("--rate", "20", "--duration", "5s", "--workers", "2", "--out", str(file))
    with running_stub() as stub, started(stub.url, *flags) as test:
        wait_for(lambda: len(stub.bodies) > 5)
        [locust] = workers_of(test.pid)
        for worker in workers_of(locust)[:killed]:
            os.kill(worker, signal.SIGKILL)
        test.communicate(timeout=60)
    assert killed == 2 or kept(file)["requests"] > 20, "the other went on"
    lost = f"{killed} of the processes that send were lost"
    assert any(lost in each for each in kept(file)["health"]["complaints"])


def test_refused_callers_come_back_when_they_were_told_to(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with running_stub({1: "refuse_for_a_second"}, UNHURRIED_S) as stub:
        for rest, most in (("10", 9), ("0.01", 10_000)):
            flags = ("--users", "3", "--duration", "2.5s", "--max-rest", rest, "--out", str(file))
            with started(stub.url, *flags) as test:
                printed, said = test.communicate(timeout=60)
            record = kept(file)
            assert record["requests"] == record["errors"] == record["refused"], printed + said
            assert "of them refusals" in printed
            assert 3 <= record["requests"] <= most
        assert record["requests"] > 30, "they did not rest for longer than they should"


def test_an_interrupted_search_tells_what_it_found(tmp_path: Path) -> None:
    flags = ["--find-capacity", "--objective", "latency_p50_ms<3000", "--duration", "1s"]
    with (
        running_stub() as stub,
        started(stub.url, *flags, "--out", str(tmp_path / "kept")) as test,
    ):
        assert test.stdout is not None
        lines = [test.stdout.readline() for _ in range(2)]
        test.send_signal(signal.SIGTERM)
        rest = test.stdout.read()
    assert "Looking for" in lines[0] and "met" in lines[1]
    assert "; interrupted" in rest
    assert len(kept(tmp_path / "kept" / "capacity.json")["points"]) == 1


@pytest.mark.parametrize("flags", [("--users", "4"), ("--shape", "constant", "--rate", "20")])
def test_a_server_that_was_away_is_told_by_kind_and_met_again(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    with ExitStack() as first:
        gone = first.enter_context(running_stub(service_s=UNHURRIED_S))
        port = gone.server_address[1]
        with started(gone.url, *flags, "--duration", "6s", "--out", str(file)) as test:
            wait_for(lambda: len(gone.bodies) > 20)
            gone.dead = True
            first.close()
            time.sleep(2.0)
            with running_stub(service_s=UNHURRIED_S, port=port) as back:
                printed, said = test.communicate(timeout=60)
                assert len(back.bodies) > 10, printed + said
    record = kept(file)
    kinds = [failure["message"] for failure in record["failures"]]
    assert any("Connection refused" in kind for kind in kinds), kinds
    assert record["timeline"][-2]["errors"] == 0
    # Four callers knock once a second each; an open loop goes on as it was planned.
    assert 3 <= record["errors"] <= 100


def test_a_report_that_cannot_be_kept_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        running_stub() as stub,
        started(stub.url, "--out", str(tmp_path / "file" / "in")) as test,
    ):
        _, said = test.communicate(timeout=30)
        assert stub.bodies == []
    assert test.returncode == 2
    assert "cannot be written: Not a directory" in said


def test_a_reader_who_leaves_does_not_lose_the_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ("--duration", "1s", "--out", str(file))
    with running_stub(service_s=UNHURRIED_S) as stub, started(stub.url, *flags) as test:
        assert test.stdout is not None
        test.stdout.close()
        assert test.wait(timeout=60) == 0
        assert test.stderr is not None
        assert test.stderr.read() == ""
    assert kept(file)["requests"] > 0


def test_a_report_that_cannot_be_drawn_ends_the_test_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise RuntimeError('this one is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--users", "1", "--duration", "1s", "--out", str(tmp_path / "kept"))
    with running_stub() as stub, started(stub.url, *flags) as test:
        _, said = test.communicate(timeout=60)
    assert test.returncode == 2 and "this one is broken" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's end")
def test_a_test_whose_command_is_killed_stops_sending(tmp_path: Path) -> None:
    flags = ("--users", "2", "--duration", "10m", "--out", str(tmp_path / "report.json"))
    with running_stub(service_s=0.05) as stub, started(stub.url, *flags) as test:
        wait_for(lambda: len(stub.bodies) > 2)
        (sender,) = workers_of(test.pid)
        test.kill()
        test.wait()
        wait_for(lambda: not Path(f"/proc/{sender}/stat").exists() or _is_dead(sender))


def _is_dead(process: int) -> bool:
    """Ended, and not yet reaped."""
    stat = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0] == "Z"
