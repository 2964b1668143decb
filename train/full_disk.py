"""What a command says when it fails: of a disk without space, what to do about it.

Knows errors of the system; not what was being written.
"""

import errno

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
