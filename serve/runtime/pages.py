"""Memory whose parts can be seen side by side with parts of other such memory, without a copy.

On Linux it is a file without a name, whose pages are mapped wherever they are wanted; a page that
was never written takes no memory. Elsewhere it is plain memory, which has one place only. Knows
pages and addresses; not what is kept there.
"""

import ctypes
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

PAGE_BYTES = mmap.PAGESIZE
_RESERVED, _BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PLACED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_PUNCH_HOLE = 0x01 | 0x02  # and keep the size
_NOWHERE = ctypes.c_void_p(-1).value
_log = logging.getLogger("stepdial.runtime")
Bytes = npt.NDArray[np.uint8]


@final
class Pages:
    """So many bytes of zeros."""

    def __init__(self, nbytes: int) -> None:
        self.file: int | None = None
        self.bytes: Bytes
        if not can_be_neighbours():
            self.bytes = np.zeros(nbytes, dtype=np.uint8)
            return
        self.file, self.bytes = _file_of(nbytes)

    def free(self, first: int, count: int) -> None:
        """These bytes, whole pages, are zeros again and take no memory."""
        if self.file is not None:
            _libc().fallocate(self.file, _PUNCH_HOLE, first, count)


class Part(NamedTuple):
    """So many bytes of a memory; whole pages of it."""

    pages: Pages
    first: int
    size: int


def side_by_side(parts: Sequence[Part]) -> Bytes:
    """These bytes, one part behind the other: the very same ones, not a copy.

    OSError where the system lets a process have no more parts.
    """
    mapped = _Mapped(sum(part.size for part in parts))
    first = 0
    for part in parts:
        assert part.pages.file is not None, "memory that has one place only"
        mapped.place(first, part.size, part.pages.file, part.first)
        first += part.size
    return np.asarray(mapped)


@cache
def can_be_neighbours() -> bool:
    """Whether parts can be seen side by side here."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return False
    try:
        file, plain = _file_of(2 * PAGE_BYTES)
        mapped = _Mapped(PAGE_BYTES)
        mapped.place(0, PAGE_BYTES, file, PAGE_BYTES)
        seen = np.asarray(mapped)
        plain[PAGE_BYTES] = 1
    except (OSError, MemoryError, AttributeError) as error:
        _log.warning("rungs share no calls: memory cannot be mapped twice here (%s)", error)
        return False
    return bool(seen[0] == 1)


def _file_of(nbytes: int) -> tuple[int, Bytes]:
    """A file without a name, and its bytes, with which it goes."""
    try:
        file = os.memfd_create("stepdial-caches")
        try:
            os.ftruncate(file, nbytes)
            mapped = _Mapped(nbytes)
            mapped.place(0, nbytes, file, 0)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for caches ({error.strerror})") from error
    # Other places that show its pages may last longer, which they must not keep in memory.
    weakref.finalize(mapped, _drop, file, nbytes).atexit = False
    return file, np.asarray(mapped)


def _drop(file: int, nbytes: int) -> None:
    _libc().fallocate(file, _PUNCH_HOLE, 0, nbytes)
    os.close(file)


@final
class _Mapped:
    """Addresses in a row, and what is placed there; given back with the last array over them."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._address = _mapped_at(None, nbytes, _RESERVED, flags, -1, 0)
        self.__array_interface__ = {
            "data": (self._address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        weakref.finalize(self, _libc().munmap, self._address, nbytes).atexit = False

    def place(self, first: int, count: int, file: int, offset: int) -> None:
        """Show so many bytes of a file from this one of mine on."""
        flags = mmap.MAP_SHARED | _PLACED
        _mapped_at(self._address + first, count, _BOTH, flags, file, offset)


def _mapped_at(
    address: int | None, nbytes: int, protection: int, flags: int, file: int, offset: int
) -> int:
    found: int = _libc().mmap(address, nbytes, protection, flags, file, offset)
    if found == _NOWHERE:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


@cache
def _libc() -> ctypes.CDLL:
    """Python's own mmap cannot say where."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return libc
