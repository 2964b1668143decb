"""Cores are kept from sleeping only while something is timed, and only by what steps aside."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab import awake

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
        end_s = time.monotonic() + 10
        while len(loops()) < len(os.sched_getaffinity(0)) and time.monotonic() < end_s:
            time.sleep(0.02)
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
    end_s = time.monotonic() + 10
    while any(Path(f"/proc/{loop}/cmdline").exists() for loop in left):
        assert time.monotonic() < end_s, "a loop goes on"
        time.sleep(0.02)
