"""A graph without caches on onnxruntime: whole prefixes in, the logits after each of them out.

Every prefix is padded to a length that follows from its own, so that its logits do not depend on
what runs beside it. Knows neither how the rows came to be nor what is chosen after them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import onnxruntime as ort

from serve.runtime.protocol import FloatArray, IntArray

BUCKET_TOKENS = 16
_FORWARD_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Source:
    """What a translation is made from: padded tokens, and what the encoder made of them."""

    tokens: IntArray  # (S,)
    memory: FloatArray  # (S, D)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of one answer so far, and its source if it is a translation."""

    tokens: IntArray  # (N,)
    source: Source | None = None


def padded_length(length: int, most: int) -> int:
    """The length to which a row of this length is padded."""
    return min(-(-length // BUCKET_TOKENS) * BUCKET_TOKENS, most)


def padded(tokens: IntArray, length: int, pad_id: int) -> IntArray:
    """A row (N,) with padding on its right."""
    row = np.full(length, pad_id, dtype=np.int64)
    row[: len(tokens)] = tokens
    return row


@final
class PrefixGraph:
    """The graph of one rung."""

    def __init__(
        self, session: ort.InferenceSession, max_tokens: int, vocab_size: int, pad_id: int
    ) -> None:
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.pad_id = pad_id
        self._session = session

    def after(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Logits (B, V) for the token after each prefix."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, prefix in enumerate(prefixes):
            source_length = 0 if prefix.source is None else len(prefix.source.tokens)
            length = padded_length(len(prefix.tokens), self.max_tokens)
            groups[length, source_length].append(index)
        logits = np.empty((len(prefixes), self.vocab_size), dtype=np.float32)  # (B, V)
        for (length, _), indices in groups.items():
            logits[indices] = self._after(length, [prefixes[index] for index in indices])
        return logits

    def forward(self, tokens: IntArray, sources: Sequence[Source] = ()) -> FloatArray:
        """Logits (B, N, V) at every position of tokens (B, N), given a source each if any."""
        rows, length = tokens.shape
        keep = np.arange(length, dtype=np.int64)
        logits = np.empty((rows, length, self.vocab_size), dtype=np.float32)
        chunk = max(1, _FORWARD_TOKENS // length)
        for start in range(0, rows, chunk):
            some = slice(start, start + chunk)
            logits[some] = self._run(tokens[some], keep, sources[some])
        return logits

    def _after(self, length: int, prefixes: list[Prefix]) -> FloatArray:
        """Logits (B, V) of prefixes that are padded to one length."""
        tokens = np.stack([padded(one.tokens, length, self.pad_id) for one in prefixes])  # (B, N)
        keep, kept = np.unique([len(one.tokens) - 1 for one in prefixes], return_inverse=True)
        if len(prefixes) == 1:
            # Runtimes multiply a single row in another order of sums than several.
            keep = np.repeat(keep, 2)
        sources = [one.source for one in prefixes if one.source is not None]
        logits = self._run(tokens, keep.astype(np.int64), sources)  # (B, K, V)
        last: FloatArray = logits[np.arange(len(prefixes)), kept]  # (B, V)
        return last

    def _run(self, tokens: IntArray, keep: IntArray, sources: Sequence[Source]) -> FloatArray:
        inputs = {"tokens": tokens, "keep": keep}
        if sources:
            inputs["source"] = np.stack([one.tokens for one in sources])  # (B, S)
            inputs["memory"] = np.stack([one.memory for one in sources])  # (B, S, D)
        logits: FloatArray = self._session.run(["logits"], inputs)[0]
        return logits  # (B, K, V)
