"""A prompt that is read piece by piece on onnxruntime, with caches of its own.

Knows how a prompt is cut: into chunks of tokens, and these into runs of steps, so that no piece
keeps others waiting for long. Attention sums in another order for other chunks, so their ends
depend on nothing but the prompt. What becomes of the row is the batch's affair.
"""

from collections.abc import Callable
from typing import final

import numpy as np

from serve.runtime.kv_cache import RowCaches
from serve.runtime.ort_crossing import OrtCrossing
from serve.runtime.protocol import CacheArray, FloatArray, IntArray

CHUNK_TOKENS = 64
PIECE_TOKENS = 128  # tokens times steps

Opening = Callable[[list[CacheArray], IntArray, int], OrtCrossing]  # caches, tokens (S,), past


@final
class OrtReading:
    """One row on its way into a batch."""

    def __init__(
        self, caches: RowCaches, open_crossing: Opening, tokens: IntArray, positions: int
    ) -> None:
        """With caches that hold nothing yet; it may come to have so many positions."""
        self.tokens = tokens  # (S,)
        self.caches = caches
        # One position more at least, since a prompt is read to be continued.
        self.room = min(max(len(tokens) + 1, positions), caches.layout.max_tokens)
        self.caches.reserve(0, 0, 1, self.room)
        self._open = open_crossing
        self._crossing: OrtCrossing | None = None
        self._read = self._step = 0

    @property
    def nbytes(self) -> int:
        return self.caches.nbytes

    @property
    def positions(self) -> int:
        return len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether all has been read."""
        return self._read == len(self.tokens)

    def advance(self) -> FloatArray | None:
        assert not self.done, "all has been read"
        chunk = self.tokens[self._read : self._read + CHUNK_TOKENS]
        if self._crossing is None:
            self._crossing = self._open(self.caches.arrays, chunk, self._read)
            self._crossing.begin()
        crossing = self._crossing
        end = min(crossing.steps, self._step + max(1, PIECE_TOKENS // len(chunk)))
        crossing.cross(self._step, end)
        self._step = end
        if end < crossing.steps:
            return None
        self._read += len(chunk)
        self._crossing, self._step = None, 0
        return crossing.end()[0, 0] if self.done else None


def last_of(tokens: IntArray) -> IntArray:
    """The position whose logits are wanted, as the head takes it."""
    return np.array([len(tokens) - 1], dtype=np.int64)
