"""Waiting until something holds, for as long as a busy machine may need."""

import time
from collections.abc import Callable


def wait_until(
    holds: Callable[[], object], problem: str = "it never came", most_s: float = 10.0
) -> None:
    """AssertionError if it does not hold within `most_s`."""
    end_s = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end_s, f"{problem} within {most_s:g} s"
        time.sleep(0.005)
