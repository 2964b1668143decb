"""How the C library keeps freed memory: set once, before a server allocates.

Cache buffers of megabytes come and go in all sizes. Left alone, glibc soon takes them from its heap
instead of mapping each, where they leave holes, and spreads them over an arena a thread: three
models and 64 clients took 532 MB where they take 442 with these settings, and kept 33 MB more after
each load where they now keep none (benchmarks/soak.py).
"""

import ctypes
import os

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's malloc.h
MAPPED_BYTES = 256 * 1024
ARENAS = 2


def keep_memory_low() -> bool:
    """Map large buffers, so that freeing them gives them back; False where it cannot be set."""
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")):
        return False  # somebody has chosen otherwise
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False  # not glibc
    set_both = [mallopt(_MMAP_THRESHOLD, MAPPED_BYTES), mallopt(_ARENA_MAX, ARENAS)]
    return all(set_both)
