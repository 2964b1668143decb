"""Rows that decode together on a graph without caches: each keeps its tokens, and its source.

Knows rows and their limit; how prefixes are run is the graph's affair.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import numpy as np

from serve.runtime.ort_prefix import Prefix, PrefixGraph
from serve.runtime.protocol import FloatArray, IntArray, WindowFullError


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

    def add(self, tokens: IntArray) -> FloatArray:
        row = self._begin(tokens)
        last: FloatArray = self._graph.after([row])[0]  # (V,)
        self._rows.append(row)
        return last

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
