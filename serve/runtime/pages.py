"""Memory whose parts can be seen side by side with parts of other such memory, without a copy.

On Linux it is a file without a name, whose pages are mapped wherever they are wanted; a page that
was never written takes no memory. A little of what is dropped is kept for the next of that size,
since new pages cost microseconds each. Elsewhere it is plain memory, which has one place only.
Knows pages and addresses; not what is kept there.
"""

import ctypes
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

PAGE_BYTES = mmap.PAGESIZE
MOST_SPARE, _MOST_ROOMS = 1 << 25, 16  # bytes of pages, and files, kept for the next
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE
_PLACED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_PUNCH_HOLE = 0x01 | 0x02  # and keep the size
_NOWHERE = ctypes.c_void_p(-1).value
_log = logging.getLogger("stepdial.runtime")
Bytes = npt.NDArray[np.uint8]


@final
class Pages:
    """So many bytes; what they are is not said."""

    def __init__(self, nbytes: int) -> None:
        self._room: _Room | None = None
        self.bytes: Bytes
        if can_be_neighbours():
            self._room = _spare_of(nbytes) or _new_room(nbytes)
            self.bytes = np.asarray(_Seen(self._room.address, nbytes, _give_back, self._room))
        else:
            self.bytes = np.zeros(nbytes, dtype=np.uint8)

    @property
    def file(self) -> int:
        assert self._room is not None, "memory that has one place only"
        return self._room.file

    def free(self, first: int, count: int) -> None:
        """These bytes, whole pages, take no memory any more."""
        if self._room is not None:
            _libc().fallocate(self._room.file, _PUNCH_HOLE, first, count)


class Part(NamedTuple):
    """So many bytes of a memory; whole pages of it."""

    pages: Pages
    first: int
    size: int


def side_by_side(parts: Sequence[Part]) -> Bytes:
    """These bytes, one part behind the other: the very same ones, not a copy.

    OSError where the system lets a process have no more parts.
    """
    size = sum(part.size for part in parts)
    address = _reserved(size)
    seen, first = _Seen(address, size, _unmap, address, size), 0
    for part in parts:
        _place(address + first, part.size, part.pages.file, part.first)
        first += part.size
    return np.asarray(seen)


@cache
def can_be_neighbours() -> bool:
    """Whether parts can be seen side by side here."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return False
    try:
        one = _new_room(PAGE_BYTES)
        _place(other := _reserved(PAGE_BYTES), PAGE_BYTES, one.file, 0)
        ctypes.c_char.from_address(one.address).value = b"1"
        same = ctypes.c_char.from_address(other).value == b"1"
        _unmap(other, PAGE_BYTES)
        _drop(one)
    except (OSError, MemoryError, AttributeError) as error:
        _log.warning("rungs share no calls: memory cannot be mapped twice here (%s)", error)
        return False
    return same


class _Room(NamedTuple):
    """A file without a name, and where all of it is mapped."""

    file: int
    address: int
    nbytes: int

    @property
    def held(self) -> int:
        """Bytes of the pages that it has."""
        return os.fstat(self.file).st_blocks * 512


_spare: list[_Room] = []  # used by any thread, also in the middle of this module: by no lock


def _spare_of(nbytes: int) -> _Room | None:
    for room in _spare[:]:
        if room.nbytes == nbytes:
            with suppress(ValueError):  # another thread was quicker
                _spare.remove(room)
                return room
    return None


def _new_room(nbytes: int) -> _Room:
    try:
        with ExitStack() as undone:
            file = os.memfd_create("stepdial-caches")
            undone.callback(os.close, file)
            os.ftruncate(file, nbytes)
            address = _reserved(nbytes)
            undone.callback(_unmap, address, nbytes)
            _place(address, nbytes, file, 0)
            undone.pop_all()
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for caches ({error.strerror})") from error
    return _Room(file, address, nbytes)


def _give_back(room: _Room) -> None:
    """Keep it for the next one, and of those that were kept before what is not too much then."""
    _spare.append(room)
    with suppress(IndexError):  # another thread was quicker
        while sum(one.held for one in _spare[:]) > MOST_SPARE or len(_spare) > _MOST_ROOMS:
            _drop(_spare.pop(0))


def _drop(room: _Room) -> None:
    # Other places that show its pages may last longer, which they must not keep in memory.
    _libc().fallocate(room.file, _PUNCH_HOLE, 0, room.nbytes)
    _unmap(room.address, room.nbytes)
    os.close(room.file)


@final
class _Seen:
    """Mapped memory as numpy takes it; what becomes of it when no array is left over it."""

    def __init__(
        self, address: int, nbytes: int, gone: Callable[..., None], *arguments: object
    ) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        weakref.finalize(self, gone, *arguments).atexit = False


def _reserved(nbytes: int) -> int:
    """Addresses in a row where nothing is yet."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return _mapped_at(None, nbytes, 0, flags, -1, 0)


def _place(address: int, count: int, file: int, offset: int) -> None:
    """Show so many bytes of a file there."""
    _mapped_at(address, count, _BOTH, mmap.MAP_SHARED | _PLACED, file, offset)


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)


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
