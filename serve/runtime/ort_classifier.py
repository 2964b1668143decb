"""One rung of a classifier on onnxruntime.

Knows padded tokens and logits; not texts, labels or who asked.
"""

from typing import final

import onnxruntime as ort

from serve.bundle import Manifest
from serve.runtime.protocol import FloatArray, IntArray
from serve.runtime.token_checks import check_tokens


@final
class OrtClassifier:
    """A stateless graph: padded rows in, a row of logits each out."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest) -> None:
        self._session = session
        self._max_tokens = manifest.input.max_tokens
        self._vocab_size = manifest.tokenizer.vocab_size
        self._pad_id = manifest.tokenizer.pad_id

    def run(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 2, self._vocab_size)  # (B, N)
        if tokens.shape[1] > self._max_tokens:
            raise ValueError(
                f"{tokens.shape[1]} tokens a row are more than max_tokens ({self._max_tokens}); "
                "truncate first"
            )
        if (tokens[:, 0] == self._pad_id).any():
            raise ValueError("a row begins with padding; each has a real token, pads to its right")
        logits: FloatArray = self._session.run(["logits"], {"tokens": tokens})[0]
        return logits  # (B, C)
