"""One rung of a decoder with caches on onnxruntime: opens batches, runs whole sequences to verify.

Knows the graphs of one step; the rows of a batch and their caches are the batch's own.
"""

from typing import final

import numpy as np

from serve.bundle import Manifest, Rung
from serve.runtime.interface import cache_names
from serve.runtime.kv_cache import CacheLayout
from serve.runtime.ort_batch import OrtDecodeBatch
from serve.runtime.ort_crossing import OrtCrossing
from serve.runtime.ort_ends import OrtEnds
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.token_checks import check_tokens

_FORWARD_TOKENS = 8192


@final
class OrtDecoder:
    """So many steps, with caches that each updates in place."""

    def __init__(self, sessions: StepSessions, manifest: Manifest, rung: Rung) -> None:
        self._sessions = sessions
        self._layout = CacheLayout.of(manifest, rung)
        self._names = cache_names(sessions.stages, manifest.shape.layers)
        self._steps = rung.steps
        self._width = manifest.shape.state_width
        self._vocab_size = manifest.text_tokenizer.vocab_size
        self._ends = OrtEnds(sessions, self._width, self._vocab_size)

    def open_batch(self) -> OrtDecodeBatch:
        return OrtDecodeBatch(
            self._sessions, self._ends, self._names, self._layout, self._width, self._vocab_size
        )

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return self._layout.bytes_for(positions, rows)

    def forward(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 2, self._vocab_size)  # (B, S)
        rows, length = tokens.shape
        if length > self._layout.max_tokens:
            raise ValueError(
                f"{length} tokens a row are more than max_tokens ({self._layout.max_tokens})"
            )
        chunk = max(1, _FORWARD_TOKENS // length)
        return np.concatenate(
            [self._forward_rows(tokens[at : at + chunk]) for at in range(0, rows, chunk)]
        )

    def _forward_rows(self, tokens: IntArray) -> FloatArray:
        rows, length = tokens.shape
        shape = (rows, self._layout.heads, length, self._layout.head_width)
        # Nothing is decoded afterwards, so all steps, stages and layers may use the same pair: each
        # writes all its positions before it reads them, and none starts before the last is done.
        pair = [np.empty(shape, dtype=self._layout.kind) for _ in range(2)]
        crossing = OrtCrossing(
            self._sessions,
            self._names,
            pair * (self._steps * len(self._names) // 2),
            tokens,
            np.zeros(rows, dtype=np.int32),
            np.arange(length, dtype=np.int64),
            self._width,
            self._vocab_size,
        )
        return crossing.run()
