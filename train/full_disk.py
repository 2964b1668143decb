"""What a command says when it fails: of a disk without space, what to do about it; to a reader
who has gone, nothing.

Knows errors of the system; not what was being written.
"""

import errno
import os
import sys

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def in_words(error: Exception) -> str:
    """The error as the user reads it."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror}: free some space and give the same command again; what was "
        "finished before is kept, and nothing unfinished is"
    )


def reader_gone() -> int:
    """The status of a command whose output nobody reads on, as of `| head`; the rest is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at the end
    return 141
