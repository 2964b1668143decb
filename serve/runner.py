"""Runs calls on the models: pads rows, keeps the decode batches, and nothing more.

It deliberately knows neither requests nor the order of work; the engine's thread is the only one
that uses it.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from serve.bundle import Manifest
from serve.classification import Row
from serve.job import LaneKey
from serve.runtime import Batches, DecodeBatch, EarlyAnswers, Model, Translation
from serve.runtime.protocol import IntArray, RowArray
from serve.sampling import FloatArray


class Runner:
    """The models that are served, and the rows that decode on them now."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._batches: dict[LaneKey, DecodeBatch] = {}
        self._searches: dict[int, Translation] = {}  # by the number of the job

    @property
    def cache_bytes(self) -> int:
        """Cache memory that is held now."""
        batches = sum(batch.nbytes for batch in self._batches.values())
        return batches + sum(search.nbytes for search in self._searches.values())

    def held_bytes(self, lane: LaneKey) -> int:
        """Cache memory that a lane's batch holds now."""
        return self._batches[lane].nbytes if lane in self._batches else 0

    def cache_bytes_for(self, lane: LaneKey, rows: int, positions: int) -> int:
        """The most cache memory that a batch which had so many rows may hold."""
        return self._batches_of(lane).bytes_for(positions, rows)

    def classify(self, lane: LaneKey, rows: Sequence[Row]) -> EarlyAnswers:
        """Answers to rows: texts of any length, images, or clouds of one size."""
        model = self._models[lane.model]
        stacked = _stacked(rows, model.bundle.manifest)
        if lane.threshold is not None:
            return model.step_classifier(lane.steps).early(stacked, lane.threshold)
        logits = model.classifier(lane.steps).run(stacked)  # (B, C)
        nfe = model.bundle.manifest.rung(lane.steps).nfe
        return EarlyAnswers(logits, np.full(len(rows), nfe, dtype=np.int64))

    def prefill(self, lane: LaneKey, tokens: list[int]) -> FloatArray:
        """Add a row that has read these tokens; logits (V,) for the token after them."""
        if lane not in self._batches:
            self._batches[lane] = self._batches_of(lane).open_batch()
        return self._batches[lane].add(np.array(tokens, np.int64))

    def decode(self, lane: LaneKey, tokens: Sequence[int]) -> FloatArray:
        """Give each row its token; logits (B, V) for the tokens after them."""
        return self._batches[lane].step(np.array(tokens, np.int64))

    def search(
        self, lane: LaneKey, number: int, source: list[int], prefixes: IntArray
    ) -> FloatArray:
        """Logits (B, V) after each prefix (B, N) of a translation; reads the source at first."""
        if number not in self._searches:
            translator = self._models[lane.model].translator(lane.steps)
            self._searches[number] = translator.read(np.array(source, np.int64))
        return self._searches[number].follow(prefixes)

    def forget(self, numbers: Iterable[int]) -> None:
        """Free the memory of searches that are over; they may never have begun."""
        for number in numbers:
            self._searches.pop(number, None)

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

    def _batches_of(self, lane: LaneKey) -> Batches:
        model = self._models[lane.model]
        if model.bundle.manifest.task == "translate":
            return model.translator(lane.steps)
        return model.decoder(lane.steps)


def _stacked(rows: Sequence[Row], manifest: Manifest) -> RowArray:
    """Rows as one array; texts are padded on their right to the longest."""
    if manifest.tokenizer is None:
        arrays: RowArray = np.stack(rows).astype(np.float32)
        return arrays
    tokens = np.full((len(rows), max(map(len, rows))), manifest.tokenizer.pad_id, np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens
