"""Runs calls on the models: pads rows, keeps the decode batches, and nothing more.

It deliberately knows neither requests nor the order of work; the engine's thread is the only one
that uses it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from serve.job import LaneKey
from serve.runtime import DecodeBatch, Model
from serve.sampling import FloatArray


class Runner:
    """The models that are served, and the rows that decode on them now."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._batches: dict[LaneKey, DecodeBatch] = {}

    @property
    def cache_bytes(self) -> int:
        """Cache memory that is held now."""
        return sum(batch.nbytes for batch in self._batches.values())

    def held_bytes(self, lane: LaneKey) -> int:
        """Cache memory that a lane's batch holds now."""
        return self._batches[lane].nbytes if lane in self._batches else 0

    def cache_bytes_for(self, lane: LaneKey, rows: int, positions: int) -> int:
        """The most cache memory that a batch which had so many rows may hold."""
        return self._models[lane.model].decoder(lane.steps).bytes_for(positions, rows)

    def classify(self, lane: LaneKey, rows: Sequence[list[int]]) -> FloatArray:
        """Logits (B, C) of rows of any length."""
        model = self._models[lane.model]
        length = max(map(len, rows))
        tokens = np.full((len(rows), length), model.bundle.manifest.tokenizer.pad_id, np.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return model.classifier(lane.steps).run(tokens)

    def prefill(self, lane: LaneKey, tokens: list[int]) -> FloatArray:
        """Add a row that has read these tokens; logits (V,) for the token after them."""
        if lane not in self._batches:
            self._batches[lane] = self._models[lane.model].decoder(lane.steps).open_batch()
        return self._batches[lane].add(np.array(tokens, np.int64))

    def decode(self, lane: LaneKey, tokens: Sequence[int]) -> FloatArray:
        """Give each row its token; logits (B, V) for the tokens after them."""
        return self._batches[lane].step(np.array(tokens, np.int64))

    def lengths(self, lane: LaneKey) -> list[int]:
        """The cached positions of each row."""
        return self._batches[lane].lengths if lane in self._batches else []

    def remove(self, lane: LaneKey, rows: Sequence[int]) -> None:
        """Drop rows in this order; a batch without rows gives its memory back."""
        if lane not in self._batches:
            return
        batch = self._batches[lane]
        for row in rows:
            batch.remove(row)
        if not batch.lengths:
            del self._batches[lane]

    def abandon(self, lane: LaneKey) -> None:
        """Drop a lane's batch, whatever state it is in."""
        self._batches.pop(lane, None)
