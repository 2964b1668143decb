"""Keeps all cores from sleeping while something is timed.

A virtual machine that has nothing to do gives its cores back, and gets them again milliseconds
late; then what is timed is the host. A loop that every other process goes before keeps each core,
and takes nothing from what is measured. Knows nothing of what that is.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@contextmanager
def awake() -> Iterator[bool]:
    """Whether the cores are kept; only Linux can."""
    if not hasattr(os, "SCHED_IDLE"):
        yield False
        return
    with ExitStack() as running:
        for core in os.sched_getaffinity(0):
            command = [sys.executable, "-c", _LOOP, str(core), str(os.getpid())]
            loop = running.enter_context(subprocess.Popen(command))
            running.callback(loop.kill)
        yield True
