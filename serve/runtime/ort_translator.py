"""One rung of a translator on onnxruntime: reads a source once, then writes after it.

Knows sources, memories and prefixes; not how the next token is chosen.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import onnxruntime as ort

from serve.bundle import Manifest
from serve.runtime.ort_prefix import Prefix, PrefixGraph, Source, padded, padded_length
from serve.runtime.ort_prefix_batch import OrtPrefixBatch
from serve.runtime.protocol import FloatArray, IntArray, WindowFullError
from serve.runtime.token_checks import check_tokens

_FLOAT_BYTES = 4


@final
@dataclass(frozen=True, slots=True)
class OrtTranslation:
    """A source that has been read."""

    graph: PrefixGraph
    source: Source

    @property
    def nbytes(self) -> int:
        return self.source.memory.nbytes

    def follow(self, prefixes: IntArray) -> FloatArray:
        return self.graph.after([Prefix(row, self.source) for row in prefixes])


@final
class OrtTranslator:
    """An encoder, and a graph of whole prefixes that sees what the encoder made."""

    def __init__(
        self, encoder: ort.InferenceSession, session: ort.InferenceSession, manifest: Manifest
    ) -> None:
        tokenizer = manifest.text_tokenizer
        assert manifest.target_max_tokens is not None and tokenizer.bos_id is not None
        self._encoder = encoder
        self._begin_tokens = np.array([tokenizer.bos_id], dtype=np.int64)  # (1,)
        self._max_source = manifest.text_input.max_tokens
        self._width = manifest.shape.width
        self._graph = PrefixGraph(
            session, manifest.target_max_tokens, tokenizer.vocab_size, tokenizer.pad_id
        )

    def open_batch(self) -> OrtPrefixBatch:
        return OrtPrefixBatch(self._graph, self._begin)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return rows * padded_length(positions, self._max_source) * self._width * _FLOAT_BYTES

    def read(self, source: IntArray) -> OrtTranslation:
        return OrtTranslation(self._graph, self._encode(source))

    def forward(self, source: IntArray, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 2, self._graph.vocab_size)  # (B, N)
        source = check_tokens(source, 2, self._graph.vocab_size)  # (B, S)
        if tokens.shape[1] > self._graph.max_tokens or source.shape[1] > self._max_source:
            raise ValueError(
                f"tokens {tokens.shape} or source {source.shape} are longer than "
                f"{self._graph.max_tokens} and {self._max_source}"
            )
        pairs = zip(source, self._run(source), strict=True)  # (S,), (S, D)
        return self._graph.forward(tokens, [Source(*pair) for pair in pairs])

    def _begin(self, tokens: IntArray) -> Prefix:
        return Prefix(self._begin_tokens, self._encode(tokens))

    def _encode(self, tokens: IntArray) -> Source:
        tokens = check_tokens(tokens, 1, self._graph.vocab_size)  # (S,)
        if len(tokens) > self._max_source:
            raise WindowFullError(
                f"a source of {len(tokens)} tokens is longer than max_tokens ({self._max_source})"
            )
        length = padded_length(len(tokens), self._max_source)
        source = padded(tokens, length, self._graph.pad_id)  # (S,)
        return Source(source, self._run(source[None])[0])

    def _run(self, source: IntArray) -> FloatArray:
        memory: FloatArray = self._encoder.run(["memory"], {"source": source})[0]
        return memory  # (B, S, D)
