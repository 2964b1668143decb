"""Key and value buffers of rows that decode together: where they lie, how they grow and shrink.

Knows sizes and memory only; neither sessions nor tokens.
"""

import math
from dataclasses import dataclass
from itertools import count
from typing import Any, final

import numpy as np

from serve.bundle import Cache, Manifest, Rung
from serve.runtime.pages import PAGE_BYTES, Pages, Part
from serve.runtime.protocol import CacheArray

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
        self._pages: Pages | None = None

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
            self.arrays, self._blocks, self._pages = [], [], None
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

    def parts(self, step: int, rows: int) -> list[Part]:
        """Where the first rows' buffers of a step lie, to be seen next to others."""
        assert self._pages is not None
        layout = self.layout
        row_bytes = layout.heads * layout.pitch * layout.head_width * layout.kind.itemsize
        place = _places(layout.steps, self.lead)[step]
        return [
            Part(
                self._pages,
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
        old, pages = (
            self._pages,
            Pages(math.prod(shape) * layout.kind.itemsize, rows * layout.row_bytes(capacity)),
        )
        blocks: list[CacheArray] = list(pages.bytes.view(layout.kind).reshape(shape))
        now, then = _places(layout.steps, self.lead), _places(layout.steps, lead)
        for index, (block, source) in enumerate(zip(blocks, self._blocks, strict=False)):
            for step in range(layout.steps):
                block[then[step], :used, :, :held] = source[now[step], :used, :, :held]
            if old is not None:
                old.free(index * source.nbytes, source.nbytes)
        self._pages, self._blocks, self.rows, self.lead = pages, blocks, rows, lead
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
