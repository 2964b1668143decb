"""Keys and values of decoder rows, in memory that several batches can map side by side.

On Linux that memory is a file without a name, whose pages are mapped wherever they are wanted; a
page that was never written takes no memory.
"""

import ctypes
import logging
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from serve.bundle import Cache, Manifest, Rung
from serve.runtime.protocol import CacheArray

PAGE_BYTES = mmap.PAGESIZE
MOST_SPARE, _MOST_MAPPINGS = 1 << 25, 16  # bytes of pages, and files, kept for the next
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_PUNCH_HOLE = 0x01 | 0x02  # and keep the size
_NAME, _NO_EXEC_SEAL = "stepdial-caches", 0x08  # MFD_NOEXEC_SEAL
_MAP_FAILED = ctypes.c_void_p(-1).value
_log = logging.getLogger("stepdial.runtime")
Bytes = npt.NDArray[np.uint8]


@final
class SharedMemory:
    """So many bytes; what they are is not said.

    No more than `held` take memory at first, which were kept from before.
    """

    def __init__(self, nbytes: int, held: int) -> None:
        self._mapping: _Mapping | None = None
        self.bytes: Bytes
        if can_map_shared():
            self._mapping = _take_spare(nbytes, held) or _new_mapping(nbytes)
            self.bytes = np.asarray(
                _MappedArray(self._mapping.address, nbytes, _recycle, self._mapping)
            )
        else:
            self.bytes = _plain(nbytes)

    @property
    def file(self) -> int:
        assert self._mapping is not None, "memory that has one place only"
        return self._mapping.file

    def free(self, first: int, count: int) -> None:
        """These bytes, whole pages, take no memory any more."""
        if self._mapping is not None:
            _libc().fallocate(self._mapping.file, _PUNCH_HOLE, first, count)


class MemoryRange(NamedTuple):
    """So many bytes of a memory; whole pages of it."""

    memory: SharedMemory
    first: int
    size: int


def map_adjacent(parts: Sequence[MemoryRange]) -> Bytes:
    """These bytes, one part behind the other: the very same ones, not a copy.

    OSError where the system lets a process have no more parts.
    """
    size = sum(part.size for part in parts)
    address = _reserve_addresses(size)
    seen, first = _MappedArray(address, size, _unmap, address, size), 0
    for part in parts:
        _map_file(address + first, part.size, part.memory.file, part.first)
        first += part.size
    return np.asarray(seen)


@cache
def can_map_shared() -> bool:
    """Whether parts can be seen side by side here."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return False
    try:
        if Path("/proc/sys/vm/overcommit_memory").read_text("ascii").strip() == "2":
            # A page that cannot be had would end the process, where plain memory is refused before.
            _log.warning("rungs share no calls: this system promises no more memory than it has")
            return False
        one = _new_mapping(PAGE_BYTES)
        _map_file(other := _reserve_addresses(PAGE_BYTES), PAGE_BYTES, one.file, 0)
        ctypes.c_char.from_address(one.address).value = b"1"
        same = ctypes.c_char.from_address(other).value == b"1"
        _unmap(other, PAGE_BYTES)
        _free(one)
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


class _Mapping(NamedTuple):
    """A file without a name, and where all of it is mapped."""

    file: int
    address: int
    nbytes: int


class _SpareMapping(NamedTuple):
    """A room that nobody uses, and the bytes of its pages."""

    mapping: _Mapping
    held: int


_spare_mappings: list[
    _SpareMapping
] = []  # used by any thread, also in the middle of this module: by no lock


def _take_spare(nbytes: int, most_held: int) -> _Mapping | None:
    for one in _spare_mappings[:]:
        if one.mapping.nbytes == nbytes and one.held <= most_held:
            with suppress(ValueError):  # another thread was quicker
                _spare_mappings.remove(one)
                return one.mapping
    return None


def _new_mapping(nbytes: int) -> _Mapping:
    try:
        with ExitStack() as undone:
            file = _nameless_file()
            undone.callback(os.close, file)
            os.ftruncate(file, nbytes)
            address = _reserve_addresses(nbytes)
            undone.callback(_unmap, address, nbytes)
            _map_file(address, nbytes, file, 0)
            undone.pop_all()
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for caches ({error.strerror})") from error
    return _Mapping(file, address, nbytes)


def _nameless_file() -> int:
    try:
        return os.memfd_create(_NAME, os.MFD_CLOEXEC | _NO_EXEC_SEAL)
    except OSError:  # of Linux before 6.3, which does not know the seal that later ones may want
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)


def _recycle(mapping: _Mapping) -> None:
    """Keep it for the next one, and of those that were kept before what is not too much then."""
    _spare_mappings.append(_SpareMapping(mapping, os.fstat(mapping.file).st_blocks * 512))
    with suppress(IndexError):  # another thread was quicker
        while (
            sum(one.held for one in _spare_mappings[:]) > MOST_SPARE
            or len(_spare_mappings) > _MOST_MAPPINGS
        ):
            _free(_spare_mappings.pop(0).mapping)


def _free(mapping: _Mapping) -> None:
    # Other places that show its pages may last longer, which they must not keep in memory.
    _libc().fallocate(mapping.file, _PUNCH_HOLE, 0, mapping.nbytes)
    _unmap(mapping.address, mapping.nbytes)
    os.close(mapping.file)


@final
class _MappedArray:
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


def _reserve_addresses(nbytes: int) -> int:
    """Addresses in a row where nothing is yet."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return _mapped_at(None, nbytes, 0, flags, -1, 0)


def _map_file(address: int, count: int, file: int, offset: int) -> None:
    """Show so many bytes of a file there."""
    _mapped_at(address, count, _BOTH, mmap.MAP_SHARED | _MAP_FIXED, file, offset)


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)


def _mapped_at(
    address: int | None, nbytes: int, protection: int, flags: int, file: int, offset: int
) -> int:
    found: int = _libc().mmap(address, nbytes, protection, flags, file, offset)
    if found == _MAP_FAILED:
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


# Key and value buffers of rows that decode together: where they lie, how they grow and shrink.


BUCKET_POSITIONS = 64
_VERSIONS = count()  # of all caches, so that none is ever taken for another
_FLOATS = np.dtype(np.float32)
_KINDS: dict[Cache, np.dtype[Any]] = {"kv": _FLOATS, "kv_int8": np.dtype(np.int8)}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The sizes that a rung's caches have."""

    steps: int
    buffers: int  # of all steps
    heads: int
    head_width: int
    max_tokens: int
    kind: "np.dtype[Any]" = _FLOATS

    @classmethod
    def of(cls, manifest: Manifest, rung: Rung) -> "CacheLayout":
        """A key and a value buffer for each evaluation and layer, in their order in a step."""
        shape = manifest.shape
        return cls(
            steps=rung.steps,
            buffers=2 * rung.nfe * shape.layers,
            heads=shape.heads,
            head_width=shape.head_width,
            max_tokens=manifest.text_input.max_tokens,
            kind=_KINDS[manifest.cache],
        )

    def capacity_for(self, positions: int) -> int:
        """Positions that a buffer gets: whoever knows what a row may come to have asks for all."""
        buckets = -(-max(positions, 1) // BUCKET_POSITIONS)
        return min(buckets * BUCKET_POSITIONS, self.max_tokens)

    @property
    def pitch(self) -> int:
        """Positions between two heads of a buffer: all a row may ever have, and whole pages.

        What no position is written to takes no memory, so it need not be as few as will be used;
        and rows of any two batches can lie side by side.
        """
        quantum = PAGE_BYTES // math.gcd(PAGE_BYTES, self.head_width * self.kind.itemsize)
        return -(-self.max_tokens // quantum) * quantum

    def rows_for(self, rows: int) -> int:
        """Rows that a buffer gets: to the row while they are few, then one to spare at most.

        Doubling would copy less when rows join, but a limit on memory would then admit half as
        many, and a row that joins costs the reading of its prompt anyway.
        """
        return rows if rows <= 4 else rows + rows % 2

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        """Bytes that so many rows of up to so many positions hold."""
        return self.rows_for(rows) * self.row_bytes(self.capacity_for(positions))

    def row_bytes(self, capacity: int) -> int:
        """Bytes of the pages that so many positions of a row are on, in all buffers."""
        a_head = capacity * self.head_width * self.kind.itemsize
        return self.buffers * self.heads * -(-a_head // PAGE_BYTES) * PAGE_BYTES


@final
class RowCaches:
    """One array (rows, heads, pitch, head_width) a buffer; the rows in use come first.

    The buffers of all steps lie in one block (steps, rows, heads, pitch, head_width) for each
    buffer of a step, those of steps `lead` apart side by side: so a row that is alone can have
    positions at such steps in one call. No more positions than `capacity` are ever written.
    """

    def __init__(self, layout: CacheLayout, lead: int = 1) -> None:
        self.layout = layout
        self.version = next(_VERSIONS)  # a new one whenever buffers move
        self.rows = 0
        self.capacity = 0
        self.lead = lead
        self.nbytes = 0
        self.arrays: list[CacheArray] = []  # step after step
        self._blocks: list[CacheArray] = []
        self._memory: SharedMemory | None = None

    def reserve(self, used: int, held: int, rows: int, positions: int) -> bool:
        """Room for so many rows of up to so many positions; True if the buffers moved.

        The first `used` rows keep the `held` positions that they have at most.
        """
        capacity = self.layout.capacity_for(positions)
        if rows <= self.rows:
            if capacity > self.capacity:
                self._allow(capacity)
            return False
        self._resize(used, held, self.layout.rows_for(rows), capacity, self.lead)
        return True

    def shrink(self, used: int, held: int, positions: int) -> bool:
        """Give back memory when three quarters are idle; True if the buffers moved.

        As in `reserve`; there should stay room for so many positions.
        """
        if used == 0:
            moved = bool(self.arrays)
            self.arrays, self._blocks, self._memory = [], [], None
            self.rows = self.capacity = self.nbytes = 0
            self.version = next(_VERSIONS)
            return moved
        capacity = self.layout.capacity_for(positions)
        # With such slack a batch at a boundary does not copy its caches to and fro; positions get
        # less of it, since every step reads slower for it.
        wasteful = 4 * used * capacity <= self.rows * self.capacity
        if not wasteful and 2 * capacity > self.capacity:
            return False
        rows = min(self.rows, self.layout.rows_for(2 * used))
        try:
            self._resize(used, held, rows, capacity, self.lead)
        except MemoryError:  # more is held than need be, which is no reason to fail
            return False
        return True

    def arrange(self, lead: int, held: int) -> bool:
        """One row only, with steps `lead` apart as neighbours; True if the buffers moved."""
        if self.rows == 1 and self.lead == lead:
            return False
        self._resize(1, held, 1, self.capacity, lead)
        return True

    def along(self, step: int, count: int) -> list[CacheArray]:
        """The only row's buffers (count, heads, capacity, head_width) of this step and the next.

        They are `lead` steps apart.
        """
        assert self.rows == 1
        first = _places(self.layout.steps, self.lead)[step]
        return [block[first : first + count, 0] for block in self._blocks]

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the cached positions of one row over another row."""
        for array in self.arrays:
            array[target, :, :positions] = array[source, :, :positions]

    def take(self, target: int, other: "RowCaches", positions: int) -> None:
        """Copy the cached positions of another's only row into a row."""
        for array, theirs in zip(self.arrays, other.arrays, strict=True):
            array[target, :, :positions] = theirs[0, :, :positions]

    def parts(self, step: int, rows: int) -> list[MemoryRange]:
        """Where the first rows' buffers of a step lie, to be seen next to others."""
        assert self._memory is not None
        layout = self.layout
        row_bytes = layout.heads * layout.pitch * layout.head_width * layout.kind.itemsize
        place = _places(layout.steps, self.lead)[step]
        return [
            MemoryRange(
                self._memory,
                (index * layout.steps + place) * self.rows * row_bytes,
                rows * row_bytes,
            )
            for index in range(len(self._blocks))
        ]

    def _resize(self, used: int, held: int, rows: int, capacity: int, lead: int) -> None:
        layout = self.layout
        assert held <= min(capacity, self.capacity) or not used, "rows would lose positions"
        a_step = layout.buffers // layout.steps
        shape = (a_step, layout.steps, rows, layout.heads, layout.pitch, layout.head_width)
        # All is there before any is replaced, so that a MemoryError changes nothing; only what is
        # written takes memory, so only what is held is.
        old, memory = (
            self._memory,
            SharedMemory(
                math.prod(shape) * layout.kind.itemsize, rows * layout.row_bytes(capacity)
            ),
        )
        blocks: list[CacheArray] = list(memory.bytes.view(layout.kind).reshape(shape))
        now, then = _places(layout.steps, self.lead), _places(layout.steps, lead)
        for index, (block, source) in enumerate(zip(blocks, self._blocks, strict=False)):
            for step in range(layout.steps):
                block[then[step], :used, :, :held] = source[now[step], :used, :, :held]
            if old is not None:
                old.free(index * source.nbytes, source.nbytes)
        self._memory, self._blocks, self.rows, self.lead = memory, blocks, rows, lead
        self.arrays = [block[then[step]] for step in range(layout.steps) for block in blocks]
        self.version = next(_VERSIONS)
        self._allow(capacity)

    def _allow(self, positions: int) -> None:
        """So many positions may be written: that is what these caches are charged for."""
        self.capacity = positions
        self.nbytes = self.rows * self.layout.row_bytes(positions)


def _places(steps: int, lead: int) -> list[int]:
    """Where each step lies when those `lead` apart are neighbours."""
    order = sorted(range(steps), key=lambda step: (step % lead, step))
    return [order.index(step) for step in range(steps)]
