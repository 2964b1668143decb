"""KV caches of decoder rows, in memory that can be mapped at several addresses at once.

On Linux that memory is an anonymous file whose pages are mapped where they are wanted. Pages that
were never written take no memory.
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
MOST_SPARE, _MOST_MAPPINGS = 1 << 25, 16  # bytes of pages, and files, kept for reuse
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE
_PUNCH_HOLE = 0x01 | 0x02  # punch a hole, keep the size
_NAME, _NO_EXEC_SEAL = "stepdial-caches", 0x08  # MFD_NOEXEC_SEAL
_MAP_FAILED = ctypes.c_void_p(-1).value
_log = logging.getLogger("stepdial.runtime")
Bytes = npt.NDArray[np.uint8]


@final
class SharedMemory:
    """A block of memory whose pages can be mapped a second time.

    At most `held` bytes of it take memory at first, left from an earlier use.
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
        """Free these bytes, which are whole pages."""
        if self._mapping is not None:
            _libc().fallocate(self._mapping.file, _PUNCH_HOLE, first, count)


class MemoryRange(NamedTuple):
    """A range of a shared memory, in whole pages."""

    memory: SharedMemory
    first: int
    size: int


def map_adjacent(parts: Sequence[MemoryRange]) -> Bytes:
    """These ranges one behind the other, mapped and not copied.

    OSError if the system allows the process no more mappings.
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
    """Whether memory can be mapped twice on this system."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return False
    try:
        if Path("/proc/sys/vm/overcommit_memory").read_text("ascii").strip() == "2":
            # Under strict overcommit a page that is missing would kill the process; plain memory is
            # refused up front.
            _log.warning(
                "step counts share no calls: this system promises no more memory than it has"
            )
            return False
        one = _new_mapping(PAGE_BYTES)
        _map_file(other := _reserve_addresses(PAGE_BYTES), PAGE_BYTES, one.file, 0)
        ctypes.c_char.from_address(one.address).value = b"1"
        same = ctypes.c_char.from_address(other).value == b"1"
        _unmap(other, PAGE_BYTES)
        _free(one)
    except (OSError, MemoryError, AttributeError) as error:
        _log.warning("step counts share no calls: memory cannot be mapped twice here (%s)", error)
        return False
    return same


def _plain(nbytes: int) -> Bytes:
    """Memory that cannot be mapped twice; only pages that are written take any."""
    try:
        mapped = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise _no_memory(nbytes, error) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8)


class _Mapping(NamedTuple):
    """An anonymous file and where it is mapped."""

    file: int
    address: int
    nbytes: int
    held: int = 0  # bytes of its pages, when it was put aside


# Used by any thread and from finalizers, so without a lock.
_spare_mappings: list[_Mapping] = []


def _take_spare(nbytes: int, most_held: int) -> _Mapping | None:
    for one in _spare_mappings[:]:
        if one.nbytes == nbytes and one.held <= most_held:
            with suppress(ValueError):  # another thread took it
                _spare_mappings.remove(one)
                return one
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
        raise _no_memory(nbytes, error) from error
    return _Mapping(file, address, nbytes)


def _no_memory(nbytes: int, error: OSError) -> MemoryError:
    return MemoryError(f"no {nbytes} bytes for caches ({error.strerror})")


def _nameless_file() -> int:
    try:
        return os.memfd_create(_NAME, os.MFD_CLOEXEC | _NO_EXEC_SEAL)
    except OSError:  # Linux before 6.3 does not know the seal
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)


def _recycle(mapping: _Mapping) -> None:
    """Keep a mapping for reuse, and free the oldest ones beyond the limits."""
    _spare_mappings.append(mapping._replace(held=os.fstat(mapping.file).st_blocks * 512))
    with suppress(IndexError):  # another thread took it
        while (
            sum(one.held for one in _spare_mappings[:]) > MOST_SPARE
            or len(_spare_mappings) > _MOST_MAPPINGS
        ):
            _free(_spare_mappings.pop(0))


def _free(mapping: _Mapping) -> None:
    # Other mappings of its pages may live longer; they must not keep the memory.
    _libc().fallocate(mapping.file, _PUNCH_HOLE, 0, mapping.nbytes)
    _unmap(mapping.address, mapping.nbytes)
    os.close(mapping.file)


@final
class _MappedArray:
    """Mapped memory as a numpy array; calls `gone` when no array uses it any more."""

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
    """A range of free addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return _mapped_at(None, nbytes, 0, flags, -1, 0)


def _map_file(address: int, count: int, file: int, offset: int) -> None:
    """Map bytes of a file at an address."""
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
    """The C library, since Python's mmap cannot choose the address."""
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


BUCKET_POSITIONS = 64
_VERSIONS = count()
_FLOATS = np.dtype(np.float32)
_KINDS: dict[Cache, np.dtype[Any]] = {
    "kv": _FLOATS,
    "kv_fp16": np.dtype(np.float16),
    "kv_int8": np.dtype(np.int8),
}


def new_version() -> int:
    """A number that no caches have had."""
    return next(_VERSIONS)


def in_buckets(positions: int) -> int:
    """The positions of as many buckets as these take, of one at least."""
    return -(-max(positions, 1) // BUCKET_POSITIONS) * BUCKET_POSITIONS


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The sizes of a rung's caches."""

    steps: int
    buffers: int  # of all steps
    heads: int
    head_width: int
    max_tokens: int
    kind: "np.dtype[Any]" = _FLOATS
    whole_buckets: bool = False  # for the longest rows too, which then have room for more

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
        """Positions to reserve for a row of this many; callers ask for the most a row may need."""
        capacity = in_buckets(positions)
        return capacity if self.whole_buckets else min(capacity, self.max_tokens)

    @property
    def pitch(self) -> int:
        """Positions between two heads of a buffer: the most a row may have, in whole pages.

        Positions that are never written take no memory, so this costs nothing; and rows of any two
        batches can be mapped side by side.
        """
        quantum = PAGE_BYTES // math.gcd(PAGE_BYTES, self.head_width * self.kind.itemsize)
        return -(-self.max_tokens // quantum) * quantum

    def rows_for(self, rows: int) -> int:
        """Rows to allocate: exact while they are few, then rounded up by one at most.

        Doubling would copy less when rows join, but a memory limit would then admit half as many
        rows, and joining costs a prefill anyway.
        """
        return rows if rows <= 4 else rows + rows % 2

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        """Memory of this many rows of up to this many positions."""
        return self.rows_for(rows) * self.row_bytes(self.capacity_for(positions))

    def row_bytes(self, capacity: int) -> int:
        """Memory of the pages of one row's positions, in all buffers."""
        a_head = capacity * self.head_width * self.kind.itemsize
        return self.buffers * self.heads * -(-a_head // PAGE_BYTES) * PAGE_BYTES


@final
class RowCaches:
    """The caches of a batch: one array (rows, heads, pitch, head_width) a buffer, used rows first.

    The buffers of all steps lie in one block (steps, rows, heads, pitch, head_width) for each
    buffer of a step, with steps `lead` apart next to each other. So a row that speculates has
    positions at such steps in one call. Positions beyond `capacity` are never written.
    """

    def __init__(self, layout: CacheLayout, lead: int = 1) -> None:
        self.layout = layout
        self.version = new_version()  # changes whenever buffers move
        self.rows = 0
        self.capacity = 0
        self.lead = lead
        self.nbytes = 0
        self.arrays: list[CacheArray] = []  # step by step
        self._blocks: list[CacheArray] = []
        self._memory: SharedMemory | None = None

    def reserve(self, used: int, held: int, rows: int, positions: int) -> bool:
        """Make room for rows of up to this many positions; True if the buffers moved.

        The first `used` rows keep their positions, which are `held` at most.
        """
        capacity = self.layout.capacity_for(positions)
        if rows <= self.rows:
            if capacity > self.capacity:
                self._allow(capacity)
            return False
        self._resize(used, held, self.layout.rows_for(rows), capacity, self.lead)
        return True

    def shrink(self, used: int, held: int, positions: int) -> None:
        """Free memory when three quarters are idle.

        As in `reserve`; room for this many positions stays.
        """
        if used == 0:
            self.arrays, self._blocks, self._memory = [], [], None
            self.rows = self.capacity = self.nbytes = 0
            self.version = new_version()
            return
        capacity = self.layout.capacity_for(positions)
        # The slack keeps a batch at a boundary from copying its caches back and forth. Positions
        # get less slack, since it slows every step.
        wasteful = 4 * used * capacity <= self.rows * self.capacity
        if wasteful or 2 * capacity <= self.capacity:
            rows = min(self.rows, self.layout.rows_for(2 * used))
            with suppress(MemoryError):  # keeping more than needed is no failure
                self._resize(used, held, rows, capacity, self.lead)

    def arrange(self, lead: int, held: int) -> bool:
        """Keep one row, with steps `lead` apart next to each other; True if the buffers moved."""
        if self.rows == 1 and self.lead == lead:
            return False
        self._resize(1, held, 1, self.capacity, lead)
        return True

    def along(self, step: int, count: int) -> list[CacheArray]:
        """The only row's buffers (count, ...) from this step on, each `lead` after the last."""
        assert self.rows == 1
        first = places(self.layout.steps, self.lead)[step]
        return [block[first : first + count, 0] for block in self._blocks]

    def join(self, lengths: Sequence[int], other: Any, length: int, positions: int) -> None:
        """Append the only row of other caches, which has so many positions.

        The rows here have these lengths; each may grow to `positions`.
        """
        assert isinstance(other, RowCaches)
        row = len(lengths)
        self.reserve(row, max(lengths, default=0), row + 1, positions)
        for array, theirs in zip(self.arrays, other.arrays, strict=True):
            array[row, :, :length] = theirs[0, :, :length]

    def leave(self, row: int, lengths: Sequence[int], positions: int) -> None:
        """Remove one of the rows of these lengths; the last takes its number.

        Room for this many positions stays.
        """
        last, length = len(lengths) - 1, lengths[-1]
        if row != last:
            for array in self.arrays:
                array[row, :, :length] = array[last, :, :length]
        left = [one for index, one in enumerate(lengths) if index != row]
        self.shrink(last, max(left, default=0), positions)

    def parts(self, step: int, rows: int) -> list[MemoryRange]:
        """Where the first rows' buffers of a step lie, to be mapped next to others."""
        assert self._memory is not None
        layout = self.layout
        row_bytes = layout.heads * layout.pitch * layout.head_width * layout.kind.itemsize
        place = places(layout.steps, self.lead)[step]
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
        # All is allocated before anything is replaced, so that a MemoryError changes nothing. Only
        # positions that are held are written, so only they take memory.
        old, memory = (
            self._memory,
            SharedMemory(
                math.prod(shape) * layout.kind.itemsize, rows * layout.row_bytes(capacity)
            ),
        )
        blocks: list[CacheArray] = list(memory.bytes.view(layout.kind).reshape(shape))
        now, then = places(layout.steps, self.lead), places(layout.steps, lead)
        for index, (block, source) in enumerate(zip(blocks, self._blocks, strict=False)):
            for step in range(layout.steps):
                block[then[step], :used, :, :held] = source[now[step], :used, :, :held]
            if old is not None:
                old.free(index * source.nbytes, source.nbytes)
        self._memory, self._blocks, self.rows, self.lead = memory, blocks, rows, lead
        self.arrays = [block[then[step]] for step in range(layout.steps) for block in blocks]
        self.version = new_version()
        self._allow(capacity)

    def _allow(self, positions: int) -> None:
        """Allow this many positions, which is what these caches are charged for."""
        self.capacity = positions
        self.nbytes = self.rows * self.layout.row_bytes(positions)


def places(steps: int, lead: int) -> list[int]:
    """The place of each step when steps `lead` apart are next to each other."""
    order = sorted(range(steps), key=lambda step: (step % lead, step))
    return [order.index(step) for step in range(steps)]
