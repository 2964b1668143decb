"""What can end a run early: a signal, a full disk, a loss or a solver that fails.

A signal is read between iterations, so that no step is cut in half; a second one ends at once.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def listen() -> Iterator[Interrupt]:
    """Take the signals over for a while; elsewhere than in the main thread there are none."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {
        number: signal.signal(number, interrupt._note)
        for number in _SIGNALS
        # A training under `nohup` goes on when the terminal goes.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Diverged(RuntimeError):
    """The loss became NaN or infinite; the message names the last good checkpoint and a remedy."""


class SolverError(RuntimeError):
    """The solver cannot go on; the message says what to change."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def in_words(error: Exception) -> str:
    """The error as the user reads it."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno not in _FULL:
        return f"{where}{error.strerror}"
    return (
        f"{where}{error.strerror}: free some space and give the same command again; what was "
        "finished before is kept, and nothing unfinished is"
    )


def reader_gone() -> int:
    """The status of a command whose output nobody reads on, as of `| head`; the rest is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at the end
    return 141
