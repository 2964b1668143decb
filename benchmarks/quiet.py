"""Whether trainings run on this machine: benchmarks do not time anything beside them unnoticed.

One file, in the machine's temporary folder, has a lock that trainings share and that a benchmark
has alone. Locks go with their process, however it ends. A second file is the wish for a pause.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FOLDER = "STEPDIAL_QUEUE_FOLDER"  # a variable that puts the files elsewhere
_REFUSED = (
    "trainings run on this machine, and what is timed beside them is wrong: pause them with "
    "`python -m benchmarks.papers.queue pause`, and let them go on with `resume`; or add "
    "--beside-trainings"
)


def _file(name: str) -> Path:
    return Path(os.environ.get(FOLDER) or tempfile.gettempdir()) / f"stepdial-trainings.{name}"


def _locked(kind: int) -> IO[str] | None:
    """The lock, or None where somebody has it in a way that excludes this one."""
    path = _file("lock")
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "w")
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


class Busy:
    """The mark that trainings run, and the wish that they pause."""

    def __init__(self) -> None:
        self.lock: IO[str] | None = None

    def mark(self) -> bool:
        """Whether the machine is marked now: not while a benchmark measures."""
        self.lock = self.lock or _locked(fcntl.LOCK_SH)
        return self.lock is not None

    def unmark(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    @property
    def paused(self) -> bool:
        return _file("pause").exists()

    def pause(self, wanted: bool) -> None:
        if wanted:
            _file("pause").touch()
        else:
            _file("pause").unlink(missing_ok=True)


@contextmanager
def quiet_machine(beside: bool) -> Iterator[None]:
    """Keep trainings from going on meanwhile; refuses where they run, or only says so."""
    lock = _locked(fcntl.LOCK_EX)
    if lock is None:
        if not beside:
            raise SystemExit(_REFUSED)
        print("WARNING: trainings run on this machine: times are wrong", file=sys.stderr)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()
