"""What the engine asks of a runtime.

Knows tokens, logits and rows; nothing of sessions, devices or the layout of caches.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from serve.bundle import Bundle

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class WindowFullError(ValueError):
    """A row has max_tokens cached positions: add it again with a shorter prompt to go on."""


class Classifier(Protocol):
    """One rung of a classifier."""

    def run(self, tokens: IntArray) -> FloatArray:
        """Logits (B, C) of tokens (B, N), each row padded on its right with pad_id."""
        ...


class DecodeBatch(Protocol):
    """Rows of ONE rung that decode together, with their caches; hides the cache layout.

    Rows are numbered from 0 in the order they were added. No method changes any row when it
    raises. The arrays returned belong to the caller.
    """

    @property
    def lengths(self) -> list[int]:
        """Cached positions of each row."""
        ...

    @property
    def nbytes(self) -> int:
        """Cache memory held now."""
        ...

    def add(self, tokens: IntArray) -> FloatArray:
        """Prefill a prompt (S,), append it as the last row, return its last logits (V,)."""
        ...

    def step(self, tokens: IntArray) -> FloatArray:
        """One token a row (B,) to its logits (B, V); every row grows by one position."""
        ...

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        ...


class Decoder(Protocol):
    """One rung of a decoder."""

    def open_batch(self) -> DecodeBatch:
        """A batch without rows, which holds no memory."""
        ...

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        """The most cache bytes that a batch which had so many rows, so long, holds."""
        ...

    def forward(self, tokens: IntArray) -> FloatArray:
        """Logits (B, S, V) at every position of tokens (B, S); keeps no cache."""
        ...


class Model(Protocol):
    """A bundle opened for running. One thread at a time may use it."""

    @property
    def bundle(self) -> Bundle:
        """What was opened."""
        ...

    def classifier(self, steps: int) -> Classifier:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def decoder(self, steps: int) -> Decoder:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def warm_up(self) -> None:
        """Open every rung and run it once, so that no request pays for that."""
        ...
