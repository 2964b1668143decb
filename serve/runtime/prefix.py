"""Rungs without KV caches, and translators: every token runs its whole prefix again."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import onnxruntime as ort

from serve.bundle import Manifest
from serve.runtime.protocol import FloatArray, IntArray, Prefill, RowArray, WindowFullError
from serve.runtime.session import check_tokens

# Each prefix is padded to a length that depends on its own length only, so that its logits do not
# depend on the other rows.


BUCKET_TOKENS = 16
_FORWARD_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a translation: padded tokens, and the encoder's output."""

    tokens: IntArray  # (S,)
    memory: FloatArray  # (S, D)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of an answer so far, and its source if it is a translation."""

    tokens: IntArray  # (N,)
    source: Source | None = None


def padded_length(length: int, most: int) -> int:
    """The length to which a row of this length is padded."""
    return min(-(-length // BUCKET_TOKENS) * BUCKET_TOKENS, most)


def padded(tokens: IntArray, length: int, pad_id: int) -> IntArray:
    """A row (N,) padded on the right."""
    row = np.full(length, pad_id, dtype=np.int64)
    row[: len(tokens)] = tokens
    return row


@final
@dataclass(frozen=True, slots=True)
class PrefixGraph:
    """The graph of one rung."""

    session: ort.InferenceSession
    max_tokens: int
    vocab_size: int
    pad_id: int

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
        """Logits (B, N, V) at every position of tokens (B, N), each with its source if any."""
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
            # Runtimes sum the products of a single row in another order.
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
        logits: FloatArray = self.session.run(["logits"], inputs)[0]
        return logits  # (B, K, V)


@final
class PrefixPrefill:
    """The prefill of a prefix, in one piece."""

    def __init__(self, graph: PrefixGraph, row: Prefix) -> None:
        self.row = row
        self._graph = graph

    @property
    def nbytes(self) -> int:
        return 0 if self.row.source is None else self.row.source.memory.nbytes

    @property
    def positions(self) -> int:
        return len(self.row.tokens)

    def advance(self) -> FloatArray:
        last: FloatArray = self._graph.after([self.row])[0]  # (V,)
        return last


@final
class OrtPrefixBatch:
    """Prefixes that grow by one token a step."""

    def __init__(self, graph: PrefixGraph, begin: Callable[[IntArray], Prefix]) -> None:
        self._graph = graph
        self._begin = begin
        self._rows: list[Prefix] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row.tokens) for row in self._rows]

    @property
    def nbytes(self) -> int:
        return sum(row.source.memory.nbytes for row in self._rows if row.source is not None)

    def read(self, tokens: IntArray, positions: int = 0) -> "PrefixPrefill":
        return PrefixPrefill(self._graph, self._begin(tokens))

    def join(self, prefill: Prefill) -> None:
        assert isinstance(prefill, PrefixPrefill), "nothing that was read here"
        self._rows.append(prefill.row)

    def add(self, tokens: IntArray) -> FloatArray:
        prefill = self.read(tokens)
        logits = prefill.advance()
        self.join(prefill)
        return logits

    def step(self, tokens: IntArray) -> FloatArray:
        rows = len(self._rows)
        if tokens.shape != (rows,) or rows == 0:
            raise ValueError(f"step takes one token for each of {rows} rows, not {tokens.shape}")
        longest = max(self.lengths)
        if longest >= self._graph.max_tokens:
            raise WindowFullError(
                f"row {self.lengths.index(longest)} has all its {longest} positions; remove it"
            )
        grown = [
            replace(row, tokens=np.append(row.tokens, np.int64(token)))
            for row, token in zip(self._rows, tokens, strict=True)
        ]
        logits = self._graph.after(grown)  # (B, V)
        self._rows = grown
        return logits

    def remove(self, row: int) -> None:
        if not 0 <= row < len(self._rows):
            raise IndexError(f"there is no row {row} among {len(self._rows)}")
        self._rows[row] = self._rows[-1]
        self._rows.pop()


@final
class OrtPrefixDecoder:
    """A decoder rung without caches."""

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


_FLOAT_BYTES = 4


@final
@dataclass(frozen=True, slots=True)
class OrtTranslation:
    """A source that the encoder has read."""

    graph: PrefixGraph
    source: Source

    @property
    def nbytes(self) -> int:
        return self.source.memory.nbytes

    def follow(self, prefixes: IntArray) -> FloatArray:
        return self.graph.after([Prefix(row, self.source) for row in prefixes])


@final
class OrtTranslator:
    """An encoder, and a graph of whole prefixes that attends to its output."""

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
