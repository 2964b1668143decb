"""Cores are kept from sleeping only while something is timed, and only by what steps aside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import awake
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")


def loops() -> list[int]:
    """Our children that step aside for everybody."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [
        child
        for child in map(int, children.split())
        if os.sched_getscheduler(child) == os.SCHED_IDLE
    ]


def test_a_loop_on_each_core_as_long_as_it_is_needed() -> None:
    with awake() as kept:
        assert kept
        wait_until(lambda: len(loops()) == len(os.sched_getaffinity(0)))
        cores = [os.sched_getaffinity(loop) for loop in loops()]
        assert sorted(map(sorted, cores)) == [[core] for core in sorted(os.sched_getaffinity(0))]
    assert not loops()


def test_loops_end_with_whoever_is_killed() -> None:
    code = (
        "import os, time\nfrom benchmarks.lab import awake\n"
        "with awake():\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = [*map(int, process.stdout.readline().split())]
        process.kill()
    assert left
    alive = [Path(f"/proc/{loop}/cmdline") for loop in left]
    wait_until(lambda: not any(path.exists() for path in alive), "a loop goes on")
