"""Rows of one decoder rung that decode together on onnxruntime.

Knows when to bind which buffer; which rows there are, and why, is the engine's affair.
"""

from typing import final

import numpy as np
import numpy.typing as npt

from serve.runtime.kv_cache import CacheLayout, RowCaches
from serve.runtime.ort_crossing import OrtCrossing
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import FloatArray, IntArray, WindowFullError
from serve.runtime.token_checks import check_tokens

_FIRST_OF_ONE = np.zeros(1, dtype=np.int64)


@final
class OrtDecodeBatch:
    """Caches as prefixes of shared buffers; the step reads and writes them in place."""

    def __init__(
        self,
        sessions: StepSessions,
        names: list[str],
        layout: CacheLayout,
        width: int,
        vocab_size: int,
    ) -> None:
        self._sessions = sessions
        self._names = names
        self._width = width
        self._vocab_size = vocab_size
        self._caches = RowCaches(layout)
        self._past: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)  # (B,)
        self._crossing: OrtCrossing | None = None  # of one token a row, until rows or buffers move

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = self._past.tolist()
        return lengths

    @property
    def nbytes(self) -> int:
        return self._caches.nbytes

    def add(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 1, self._vocab_size)  # (S,)
        max_tokens = self._caches.layout.max_tokens
        if len(tokens) > max_tokens:
            raise WindowFullError(
                f"a prompt of {len(tokens)} tokens is longer than max_tokens ({max_tokens}); "
                "keep its last ones"
            )
        row = len(self._past)
        # One position more, since a prompt is added to be continued.
        positions = max(len(tokens), self._longest()) + 1
        if self._caches.reserve(row, row + 1, positions):
            self._crossing = None
        try:
            last: FloatArray = self._cross(row, tokens, 0, keep=_last_of(tokens))[0]  # (V,)
        except BaseException:
            self._shrink()
            raise
        self._past = np.append(self._past, np.int32(len(tokens)))
        self._crossing = None
        return last

    def extend(self, row: int, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 1, self._vocab_size)  # (S,)
        self._check_row(row)
        past, max_tokens = int(self._past[row]), self._caches.layout.max_tokens
        if past + len(tokens) > max_tokens:
            raise WindowFullError(
                f"{len(tokens)} tokens behind {past} are more than max_tokens ({max_tokens})"
            )
        rows = len(self._past)
        if self._caches.reserve(rows, rows, max(past + len(tokens), self._longest())):
            self._crossing = None
        logits = self._cross(row, tokens, past, keep=np.arange(len(tokens)))  # (S, V)
        self._past[row] += len(tokens)
        return logits

    def step(self, tokens: IntArray) -> FloatArray:
        rows = len(self._past)
        if tokens.shape != (rows,) or rows == 0:
            raise ValueError(f"step takes one token for each of {rows} rows, not {tokens.shape}")
        longest = self._longest()
        if longest >= self._caches.layout.max_tokens:
            raise WindowFullError(
                f"row {int(self._past.argmax())} has max_tokens ({longest}) cached positions; "
                "remove it and add its last tokens again"
            )
        if self._caches.reserve(rows, rows, longest + 1):
            self._crossing = None
        if self._crossing is None:
            one = np.zeros((rows, 1), dtype=np.int64)
            self._crossing = self._open(0, one, self._past, _FIRST_OF_ONE)
        self._crossing.tokens[:, 0] = tokens
        logits: FloatArray = self._crossing.run()[:, 0].copy()  # (B, V)
        self._past += 1
        return logits

    def remove(self, row: int) -> None:
        self._check_row(row)
        last = len(self._past) - 1
        if row != last:
            self._caches.move(last, row, int(self._past[last]))
        past = self._past[:last].copy()
        if row != last:
            past[row] = self._past[last]
        self._past = past
        self._crossing = None
        self._shrink()

    def _longest(self) -> int:
        return int(self._past.max(initial=0))

    def _shrink(self) -> None:
        if self._caches.shrink(len(self._past), self._longest() + 1):
            self._crossing = None

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._past):
            raise IndexError(f"there is no row {row} among {len(self._past)}")

    def _cross(self, row: int, tokens: IntArray, past: int, keep: IntArray) -> FloatArray:
        """Logits (K, V) of tokens (S,) of one row, with its caches where they are."""
        crossing = self._open(row, tokens[None], np.array([past], dtype=np.int32), keep)
        logits: FloatArray = crossing.run()[0]
        return logits

    def _open(
        self, first: int, tokens: IntArray, past: npt.NDArray[np.int32], keep: IntArray
    ) -> OrtCrossing:
        caches = [array[first : first + len(tokens)] for array in self._caches.arrays]
        return OrtCrossing(
            self._sessions,
            self._names,
            caches,
            tokens,
            past,
            keep,
            self._width,
            self._vocab_size,
        )


def _last_of(tokens: IntArray) -> IntArray:
    return np.array([len(tokens) - 1], dtype=np.int64)
