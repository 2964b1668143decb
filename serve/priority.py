"""Which threads the system runs first: the one that answers, before those that compute.

While models run they keep every core busy, and whoever asks would wait until the system takes one
away from them. What is computed loses nothing by it: requests take little time, and often decide
what is computed next. Knows threads, not what they do.
"""

import os
from pathlib import Path

_LOWER = 10  # of 19: a tenth of a core, where two want one
_THREADS = Path("/proc/self/task")


def answer_first() -> None:
    """Of all threads that there are now, run the main one first; where Linux can tell them."""
    own = os.getpid()
    if not _THREADS.is_dir():
        return
    wanted = min(19, os.getpriority(os.PRIO_PROCESS, own) + _LOWER)
    for thread in (int(path.name) for path in _THREADS.iterdir()):
        try:
            if thread != own and os.getpriority(os.PRIO_PROCESS, thread) < wanted:
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except ProcessLookupError:
            pass  # it has ended
