"""One rung of a decoder with caches on onnxruntime: opens batches, runs whole sequences to verify.

Knows the graph's inputs; the rows of a batch and their caches are the batch's own.
"""

from typing import final

import numpy as np
import onnxruntime as ort

from serve.bundle import Manifest, Rung
from serve.runtime.interface import cache_names
from serve.runtime.kv_cache import CacheLayout
from serve.runtime.ort_batch import OrtDecodeBatch
from serve.runtime.ort_binding import bind_input, bind_output
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.token_checks import check_tokens

_FORWARD_TOKENS = 8192


@final
class OrtDecoder:
    """A graph that serves prefill and decode, with caches that it updates in place."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest, rung: Rung) -> None:
        self._session = session
        self._layout = CacheLayout.of(manifest, rung)
        self._names = cache_names(rung.nfe, manifest.shape.layers)
        self._vocab_size = manifest.text_tokenizer.vocab_size

    def open_batch(self) -> OrtDecodeBatch:
        return OrtDecodeBatch(self._session, self._names, self._layout, self._vocab_size)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return self._layout.bytes_for(positions, rows)

    def forward(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 2, self._vocab_size)  # (B, S)
        rows, length = tokens.shape
        if length > self._layout.max_tokens:
            raise ValueError(
                f"{length} tokens a row are more than max_tokens ({self._layout.max_tokens})"
            )
        logits = np.empty((rows, length, self._vocab_size), dtype=np.float32)
        chunk = max(1, _FORWARD_TOKENS // length)
        for start in range(0, rows, chunk):
            self._forward_rows(tokens[start : start + chunk], logits[start : start + chunk])
        return logits

    def _forward_rows(self, tokens: IntArray, logits: FloatArray) -> None:
        rows, length = tokens.shape
        shape = (rows, self._layout.heads, length, self._layout.head_width)
        past = np.zeros(rows, dtype=np.int32)
        keep = np.arange(length, dtype=np.int64)
        # Nothing is decoded afterwards, so every evaluation and layer may use the same pair: each
        # writes all its positions before it reads them, and none starts before the last is done.
        pair = [np.empty(shape, dtype=np.float32) for _ in range(2)]
        binding = self._session.io_binding()
        bind_input(binding, "tokens", tokens)
        bind_input(binding, "past", past)
        bind_input(binding, "keep", keep)
        bind_output(binding, "logits", logits)
        for index, name in enumerate(self._names):
            bind_input(binding, name, pair[index % 2])
            bind_output(binding, f"{name}_out", pair[index % 2])
        self._session.run_with_iobinding(binding)
