"""Wakes a greenlet at a moment, to a fraction of a millisecond.

gevent's own timers are as coarse as its poll, a millisecond or more, which would be counted as
latency of the server; where the system has timer files, they are used instead.
It deliberately knows nothing of what is done then.
"""

import ctypes
import os
import sys
import time
from typing import Any

import gevent
from gevent.hub import get_hub

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_NO_BLOCK = os.O_NONBLOCK
_LONGEST_S = 0.5  # of one wait, so that whoever waits can see that the test is over


class _Setting(ctypes.Structure):
    """struct itimerspec: an interval, unused, and a moment."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "moment_s", "moment_ns")
    )


class Alarm:
    """One timer of one greenlet; moments are those of time.monotonic()."""

    def __init__(self) -> None:
        self._file: int | None = None
        if sys.platform == "linux":
            self._system = ctypes.CDLL(None, use_errno=True)
            made = self._system.timerfd_create(time.CLOCK_MONOTONIC, _NO_BLOCK)
            self._file = made if made >= 0 else None
        hub = get_hub()
        self._watcher: Any = None if self._file is None else hub.loop.io(self._file, 1)

    def approach(self, moment_s: float) -> bool:
        """Wait for the moment, or for half a second; whether it has come."""
        left_s = moment_s - time.monotonic()
        if left_s <= 0:
            gevent.sleep(0)  # others may have something to send
            return True
        if self._file is None or left_s > _LONGEST_S:
            gevent.sleep(min(left_s, _LONGEST_S))
        else:
            self._wait(moment_s)
        return time.monotonic() >= moment_s

    def close(self) -> None:
        """Give the timer back."""
        if self._file is not None:
            self._watcher.close()
            os.close(self._file)
            self._file = None

    def _wait(self, moment_s: float) -> None:
        whole_s = int(moment_s)
        setting = _Setting(0, 0, whole_s, int((moment_s - whole_s) * 1e9))
        assert self._file is not None
        self._system.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None)
        get_hub().wait(self._watcher)
        os.read(self._file, 8)
