"""Key and value buffers of rows that decode together: where they lie, how they grow and shrink.

Knows sizes and memory only; neither sessions nor tokens.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from serve.bundle import Manifest, Rung
from serve.runtime.protocol import FloatArray

BUCKET_POSITIONS = 64
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The sizes that a rung's caches have."""

    buffers: int
    heads: int
    head_width: int
    max_tokens: int

    @classmethod
    def of(cls, manifest: Manifest, rung: Rung) -> "CacheLayout":
        """A key and a value buffer for each evaluation and layer, in their order in a step."""
        shape = manifest.shape
        return cls(
            buffers=2 * rung.nfe * shape.layers,
            heads=shape.heads,
            head_width=shape.head_width,
            max_tokens=manifest.text_input.max_tokens,
        )

    def capacity_for(self, positions: int) -> int:
        """Positions that a buffer gets: tight ones are read up to twice as fast."""
        buckets = -(-max(positions, 1) // BUCKET_POSITIONS)
        return min(buckets * BUCKET_POSITIONS, self.max_tokens)

    def rows_for(self, rows: int) -> int:
        """Rows that a buffer gets: to the row while they are few, then one to spare at most.

        Doubling would copy less when rows join, but a limit on memory would then admit half as
        many, and a row that joins costs the reading of its prompt anyway.
        """
        return rows if rows <= 4 else rows + rows % 2

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        """Bytes that so many rows of up to so many positions hold."""
        capacity = self.capacity_for(positions)
        return (
            self.rows_for(rows)
            * self.buffers
            * self.heads
            * capacity
            * self.head_width
            * _FLOAT_BYTES
        )


@final
class RowCaches:
    """One array (rows, heads, capacity, head_width) a buffer; the rows in use come first."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.rows = 0
        self.capacity = 0
        self.arrays: list[FloatArray] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def reserve(self, used: int, rows: int, positions: int) -> bool:
        """Room for so many rows of up to so many positions; True if the buffers moved.

        The first `used` rows keep what they hold, which is within `positions`.
        """
        capacity = self.layout.capacity_for(positions)
        if rows <= self.rows and capacity <= self.capacity:
            return False
        grown_rows = self.rows if rows <= self.rows else self.layout.rows_for(rows)
        self._resize(used, grown_rows, capacity)
        return True

    def shrink(self, used: int, positions: int) -> bool:
        """Give back memory when three quarters are idle; True if the buffers moved."""
        if used == 0:
            moved = bool(self.arrays)
            self.arrays, self.rows, self.capacity = [], 0, 0
            return moved
        capacity = self.layout.capacity_for(positions)
        # With such slack a batch at a boundary does not copy its caches to and fro; positions get
        # less of it, since every step reads slower for it.
        wasteful = 4 * used * capacity <= self.rows * self.capacity
        if not wasteful and 2 * capacity > self.capacity:
            return False
        self._resize(used, min(self.rows, self.layout.rows_for(2 * used)), capacity)
        return True

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the cached positions of one row over another row."""
        for array in self.arrays:
            array[target, :, :positions] = array[source, :, :positions]

    def _resize(self, used: int, rows: int, capacity: int) -> None:
        heads, width = self.layout.heads, self.layout.head_width
        # All are allocated before any is replaced, so that a MemoryError changes nothing; pages
        # of zeros cost no memory until they are written.
        arrays = [
            np.zeros((rows, heads, capacity, width), dtype=np.float32)
            for _ in range(self.layout.buffers)
        ]
        kept = min(capacity, self.capacity)
        for index, old in enumerate(self.arrays):
            arrays[index][:used, :, :kept] = old[:used, :, :kept]
            self.arrays[index] = arrays[index]
        self.arrays, self.rows, self.capacity = arrays, rows, capacity
