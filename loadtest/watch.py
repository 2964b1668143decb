"""What goes on every second beside the callers: the gauge is read, and progress is shown.

It deliberately knows nothing of Locust.
"""

import sys
import time
from collections.abc import Callable

import gevent

from loadtest.generator import Gauge
from loadtest.plan import Plan


def keep_gauge(gauge: Gauge, is_current: Callable[[], bool]) -> None:
    """As long as the test is the one that runs."""
    while is_current():
        gevent.sleep(1)
        gauge.mark()


def show_progress(plan: Plan, is_current: Callable[[], bool]) -> None:
    """How many answers have come, in one line that is written again and again."""
    begin_s = time.monotonic()
    while is_current() and plan.ended_s is None:
        errors = sum(outcome.error is not None for outcome in plan.outcomes)
        line = f"{time.monotonic() - begin_s:4.0f} s: {len(plan.outcomes)} answers, {errors} errors"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        gevent.sleep(1)
