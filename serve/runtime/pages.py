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
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

PAGE_BYTES = mmap.PAGESIZE
MOST_SPARE, _MOST_ROOMS = 1 << 25, 16  # bytes of pages, and files, kept for the next
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE
_PLACED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_PUNCH_HOLE = 0x01 | 0x02  # and keep the size
_NAME, _NO_EXEC_SEAL = "stepdial-caches", 0x08  # MFD_NOEXEC_SEAL
_NOWHERE = ctypes.c_void_p(-1).value
_log = logging.getLogger("stepdial.runtime")
Bytes = npt.NDArray[np.uint8]


@final
class Pages:
    """So many bytes; what they are is not said.

    No more than `held` take memory at first, which were kept from before.
    """

    def __init__(self, nbytes: int, held: int) -> None:
        self._room: _Room | None = None
        self.bytes: Bytes
        if can_be_neighbours():
            self._room = _spare_of(nbytes, held) or _new_room(nbytes)
            self.bytes = np.asarray(_Seen(self._room.address, nbytes, _give_back, self._room))
        else:
            self.bytes = _plain(nbytes)

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
        if Path("/proc/sys/vm/overcommit_memory").read_text("ascii").strip() == "2":
            # A page that cannot be had would end the process, where plain memory is refused before.
            _log.warning("rungs share no calls: this system promises no more memory than it has")
            return False
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


def _plain(nbytes: int) -> Bytes:
    """Memory with one place, of which only pages that are written take any."""
    mapped = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8)


class _Room(NamedTuple):
    """A file without a name, and where all of it is mapped."""

    file: int
    address: int
    nbytes: int


class _Spare(NamedTuple):
    """A room that nobody uses, and the bytes of its pages."""

    room: _Room
    held: int


_spare: list[_Spare] = []  # used by any thread, also in the middle of this module: by no lock


def _spare_of(nbytes: int, most_held: int) -> _Room | None:
    for one in _spare[:]:
        if one.room.nbytes == nbytes and one.held <= most_held:
            with suppress(ValueError):  # another thread was quicker
                _spare.remove(one)
                return one.room
    return None


def _new_room(nbytes: int) -> _Room:
    try:
        with ExitStack() as undone:
            file = _nameless_file()
            undone.callback(os.close, file)
            os.ftruncate(file, nbytes)
            address = _reserved(nbytes)
            undone.callback(_unmap, address, nbytes)
            _place(address, nbytes, file, 0)
            undone.pop_all()
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for caches ({error.strerror})") from error
    return _Room(file, address, nbytes)


def _nameless_file() -> int:
    try:
        return os.memfd_create(_NAME, os.MFD_CLOEXEC | _NO_EXEC_SEAL)
    except OSError:  # of Linux before 6.3, which does not know the seal that later ones may want
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)


def _give_back(room: _Room) -> None:
    """Keep it for the next one, and of those that were kept before what is not too much then."""
    _spare.append(_Spare(room, os.fstat(room.file).st_blocks * 512))
    with suppress(IndexError):  # another thread was quicker
        while sum(one.held for one in _spare[:]) > MOST_SPARE or len(_spare) > _MOST_ROOMS:
            _drop(_spare.pop(0).room)


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
