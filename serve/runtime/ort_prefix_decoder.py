"""One rung of a decoder without caches on onnxruntime: every token reads the whole prefix again.

Knows prompts and their limit; not what is chosen after them.
"""

from typing import final

import onnxruntime as ort

from serve.bundle import Manifest
from serve.runtime.ort_prefix import Prefix, PrefixGraph
from serve.runtime.ort_prefix_batch import OrtPrefixBatch
from serve.runtime.protocol import FloatArray, IntArray, RowArray, WindowFullError
from serve.runtime.token_checks import check_tokens


@final
class OrtPrefixDecoder:
    """A graph of whole prefixes."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest) -> None:
        tokenizer = manifest.text_tokenizer
        max_tokens = manifest.text_input.max_tokens
        self._graph = PrefixGraph(session, max_tokens, tokenizer.vocab_size, tokenizer.pad_id)

    def open_batch(self) -> OrtPrefixBatch:
        return OrtPrefixBatch(self._graph, self._begin)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return 0

    def forward(self, rows: RowArray) -> FloatArray:
        tokens = check_tokens(rows, 2, self._graph.vocab_size)  # (B, S)
        if tokens.shape[1] > self._graph.max_tokens:
            raise ValueError(
                f"{tokens.shape[1]} tokens a row are more than max_tokens "
                f"({self._graph.max_tokens})"
            )
        return self._graph.forward(tokens)

    def _begin(self, tokens: IntArray) -> Prefix:
        tokens = check_tokens(tokens, 1, self._graph.vocab_size)  # (S,)
        if len(tokens) > self._graph.max_tokens:
            raise WindowFullError(
                f"a prompt of {len(tokens)} tokens is longer than max_tokens "
                f"({self._graph.max_tokens}); keep its last ones"
            )
        return Prefix(tokens)
