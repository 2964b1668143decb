"""Rows that decode together on a graph without caches: each keeps its tokens, and its source.

Knows rows and their limit; how prefixes are run is the graph's affair.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import numpy as np

from serve.runtime.ort_prefix import Prefix, PrefixGraph
from serve.runtime.protocol import FloatArray, IntArray, Reading, WindowFullError


@final
class PrefixReading:
    """A prefix, which is read in one piece."""

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

    def read(self, tokens: IntArray, positions: int = 0) -> "PrefixReading":
        return PrefixReading(self._graph, self._begin(tokens))

    def join(self, reading: Reading) -> None:
        assert isinstance(reading, PrefixReading), "nothing that was read here"
        self._rows.append(reading.row)

    def add(self, tokens: IntArray) -> FloatArray:
        reading = self.read(tokens)
        logits = reading.advance()
        self.join(reading)
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

    def extend(self, row: int, tokens: IntArray) -> FloatArray:
        self._check_row(row)
        base = self._rows[row]
        grown = [
            replace(base, tokens=np.concatenate([base.tokens, tokens[: count + 1]]))
            for count in range(len(tokens))
        ]
        if len(grown[-1].tokens) > self._graph.max_tokens:
            raise WindowFullError(
                f"{len(tokens)} tokens behind {len(base.tokens)} are more than the "
                f"{self._graph.max_tokens} positions of a row"
            )
        logits = self._graph.after(grown)  # (S, V)
        self._rows[row] = grown[-1]
        return logits

    def remove(self, row: int) -> None:
        self._check_row(row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._rows):
            raise IndexError(f"there is no row {row} among {len(self._rows)}")
