"""Which threads the system runs first: the one that answers, before those that compute.

While models run they keep every core busy, and whoever asks waits until the system takes one away
from them. In a container, or another group of processes with a share of its own, what computes
loses nothing by it: requests take little time. Elsewhere every other program of the machine goes
before it as well, so that whoever runs the server says it. Knows threads, not what they do.
"""

import os
from pathlib import Path

_THREADS = Path("/proc/self/task")


def answer_first(nice: int) -> None:
    """Let all threads that there are now but the main one be nicer by so much; on Linux only."""
    own = os.getpid()
    if not nice or not _THREADS.is_dir():
        return
    wanted = min(19, os.getpriority(os.PRIO_PROCESS, own) + nice)
    for thread in (int(path.name) for path in _THREADS.iterdir()):
        try:
            if thread != own and os.getpriority(os.PRIO_PROCESS, thread) < wanted:
                os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except ProcessLookupError:
            pass  # it has ended
