"""The time of a call on the thread that makes it, on the processor and on the wall.

On a busy machine the processor's time is the steadier one; on one at rest the two are the same, as
long as the call uses no other thread. It deliberately knows nothing of what is called.
"""

import time
from collections.abc import Callable
from typing import NamedTuple


class Times(NamedTuple):
    """Milliseconds of one call."""

    cpu_ms: float
    wall_ms: float


def clocked(call: Callable[[], object], least_ms: float) -> Times:
    """The mean of as many calls as take that long, and at least of one."""
    calls, cpu_s, wall_s = 0, time.thread_time(), time.perf_counter()
    while True:
        call()
        calls += 1
        spent_ms = (time.thread_time() - cpu_s) * 1000
        if spent_ms >= least_ms:
            return Times(spent_ms / calls, (time.perf_counter() - wall_s) * 1000 / calls)
