"""How the C library keeps freed memory: set before a server allocates, given back while it runs.

Cache buffers of megabytes come and go in all sizes. Left alone, glibc soon takes them from its heap
instead of mapping each, where they leave holes, and spreads them over an arena a thread: three
models and 64 clients took 532 MB where they take 442 with these settings, and kept 33 MB more after
each load where they now keep none (benchmarks/soak.py). What is smaller leaves holes all the same:
after a burst 250 MB stayed 270 to 374, and 249 to 258 where holes are given back.
"""

import ctypes
import os
import threading
import time

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's malloc.h
MAPPED_BYTES = 256 * 1024
ARENAS = 2
GIVE_BACK_S = 10.0  # between two times; each takes a millisecond or two


def keep_memory_low() -> bool:
    """Map large buffers, so that freeing them gives them back; False where it cannot be set."""
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")):
        return False  # somebody has chosen otherwise
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False  # not glibc
    both_set = all([mallopt(_MMAP_THRESHOLD, MAPPED_BYTES), mallopt(_ARENA_MAX, ARENAS)])
    if both_set:  # by glibc, which alone can give back
        threading.Thread(target=_give_back, name="memory", daemon=True).start()
    return both_set


def _give_back() -> None:
    """Again and again, whatever lies free between what is in use."""
    trim = ctypes.CDLL(None).malloc_trim
    while True:
        time.sleep(GIVE_BACK_S)
        trim(0)
