"""What comes before and after the steps of rows that get one token each, bound once for each size.

Knows the graphs of embed and head; not which rows these are.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.runtime.ort_binding import bind_input, bind_output
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import FloatArray, IntArray

_KEPT_SIZES = 64


@final
@dataclass(slots=True)
class _Embed:
    binding: ort.IOBinding
    tokens: IntArray  # (B, 1)
    past: npt.NDArray[np.int32]  # (B,)
    x: FloatArray  # (B, 1, D)
    seqlens: npt.NDArray[np.int32]  # (B,)
    total: npt.NDArray[np.int32]  # ()


@final
@dataclass(slots=True)
class _Head:
    binding: ort.IOBinding
    x: FloatArray  # (B, 1, D)
    logits: FloatArray  # (B, 1, V)


@final
class OrtEnds:
    """Calls that come again and again are bound to buffers of their own."""

    def __init__(self, sessions: StepSessions, width: int, vocab_size: int) -> None:
        self._sessions, self._width, self._vocab_size = sessions, width, vocab_size
        self._first = np.zeros(1, dtype=np.int64)
        self._embeds: dict[int, _Embed] = {}
        self._heads: dict[int, _Head] = {}

    def embed(
        self, tokens: IntArray | int, past: npt.NDArray[np.int32] | int, rows: int = 1
    ) -> tuple[FloatArray, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """State (B, 1, D), lengths (B,) and the largest () of tokens (B,) behind positions (B,).

        The next call for as many rows overwrites them.
        """
        call = self._embeds.get(rows) or self._bound_embed(rows)
        call.tokens[:, 0], call.past[:] = tokens, past
        self._sessions.embed.run_with_iobinding(call.binding)
        return call.x, call.seqlens, call.total

    def head(self, x: FloatArray) -> FloatArray:
        """Logits (B, V) of states (B, 1, D), a copy."""
        call = self._heads.get(len(x)) or self._bound_head(len(x))
        call.x[:] = x
        self._sessions.head.run_with_iobinding(call.binding)
        return call.logits[:, 0].copy()

    def _bound_embed(self, rows: int) -> _Embed:
        call = _Embed(
            self._sessions.embed.io_binding(),
            np.zeros((rows, 1), dtype=np.int64),
            np.zeros(rows, dtype=np.int32),
            np.empty((rows, 1, self._width), dtype=np.float32),
            np.empty(rows, dtype=np.int32),
            np.empty((), dtype=np.int32),
        )
        bind_input(call.binding, "tokens", call.tokens)
        bind_input(call.binding, "past", call.past)
        bind_output(call.binding, "x", call.x)
        bind_output(call.binding, "seqlens", call.seqlens)
        bind_output(call.binding, "total", call.total)
        if len(self._embeds) >= _KEPT_SIZES:
            self._embeds.clear()
        self._embeds[rows] = call
        return call

    def _bound_head(self, rows: int) -> _Head:
        call = _Head(
            self._sessions.head.io_binding(),
            np.zeros((rows, 1, self._width), dtype=np.float32),
            np.empty((rows, 1, self._vocab_size), dtype=np.float32),
        )
        bind_input(call.binding, "x", call.x)
        bind_input(call.binding, "keep", self._first)
        bind_output(call.binding, "logits", call.logits)
        if len(self._heads) >= _KEPT_SIZES:
            self._heads.clear()
        self._heads[rows] = call
        return call
