"""Rows of one decoder rung that decode together on onnxruntime.

Knows when to bind which buffer; which rows there are, and why, is the engine's affair.
"""

from typing import final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.runtime.kv_cache import CacheLayout, RowCaches
from serve.runtime.ort_binding import bind_input, bind_output
from serve.runtime.protocol import FloatArray, IntArray, WindowFullError
from serve.runtime.token_checks import check_tokens

_FIRST_OF_ONE = np.zeros(1, dtype=np.int64)


@final
class OrtDecodeBatch:
    """Caches as prefixes of shared buffers; the graph reads and writes them in place."""

    def __init__(
        self,
        session: ort.InferenceSession,
        names: list[str],
        layout: CacheLayout,
        vocab_size: int,
    ) -> None:
        self._session = session
        self._names = names
        self._vocab_size = vocab_size
        self._caches = RowCaches(layout)
        self._past: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)  # (B,)
        self._binding: ort.IOBinding | None = None
        self._tokens: IntArray = np.zeros((0, 1), dtype=np.int64)  # (B, 1)
        self._logits: FloatArray = np.zeros((0, 1, vocab_size), dtype=np.float32)  # (B, 1, V)

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
            self._binding = None
        logits = np.empty((1, 1, self._vocab_size), dtype=np.float32)
        try:
            self._prefill(row, tokens[None], logits)
        except BaseException:
            self._shrink()
            raise
        self._past = np.append(self._past, np.int32(len(tokens)))
        self._binding = None
        last: FloatArray = logits[0, 0]  # (V,)
        return last

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
            self._binding = None
        if self._binding is None:
            self._binding = self._bind(rows)
        self._tokens[:, 0] = tokens
        self._session.run_with_iobinding(self._binding)
        self._past += 1
        logits: FloatArray = self._logits[:, 0].copy()  # (B, V)
        return logits

    def remove(self, row: int) -> None:
        last = len(self._past) - 1
        if not 0 <= row <= last:
            raise IndexError(f"there is no row {row} among {last + 1}")
        if row != last:
            self._caches.move(last, row, int(self._past[last]))
        past = self._past[:last].copy()
        if row != last:
            past[row] = self._past[last]
        self._past = past
        self._binding = None
        self._shrink()

    def _longest(self) -> int:
        return int(self._past.max(initial=0))

    def _shrink(self) -> None:
        if self._caches.shrink(len(self._past), self._longest() + 1):
            self._binding = None

    def _prefill(self, row: int, tokens: IntArray, logits: FloatArray) -> None:
        """Run a prompt (1, S) with its caches already where the row will be."""
        past = np.zeros(1, dtype=np.int32)
        keep = np.array([tokens.shape[1] - 1], dtype=np.int64)
        binding = self._session.io_binding()
        bind_input(binding, "tokens", tokens)
        bind_input(binding, "past", past)
        bind_input(binding, "keep", keep)
        bind_output(binding, "logits", logits)
        self._bind_caches(binding, row, row + 1)
        self._session.run_with_iobinding(binding)

    def _bind(self, rows: int) -> ort.IOBinding:
        """Everything that a step needs; valid until a row comes or goes or the buffers move."""
        self._tokens = np.zeros((rows, 1), dtype=np.int64)
        self._logits = np.zeros((rows, 1, self._vocab_size), dtype=np.float32)
        binding = self._session.io_binding()
        bind_input(binding, "tokens", self._tokens)
        bind_input(binding, "past", self._past)
        bind_input(binding, "keep", _FIRST_OF_ONE)
        bind_output(binding, "logits", self._logits)
        self._bind_caches(binding, 0, rows)
        return binding

    def _bind_caches(self, binding: ort.IOBinding, first: int, end: int) -> None:
        for name, array in zip(self._names, self._caches.arrays, strict=True):
            bind_input(binding, name, array[first:end])
            bind_output(binding, f"{name}_out", array[first:end])
