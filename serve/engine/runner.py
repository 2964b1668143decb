"""Runs calls on the models: pads rows, keeps the decode batches, and nothing more.

It deliberately knows neither requests nor the order of work; the engine's thread is the only one
that uses it, save to interrupt a call.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from serve.bundle import Manifest
from serve.runtime import (
    Batches,
    DecodeBatch,
    EarlyAnswers,
    Leg,
    Mix,
    Model,
    Outcome,
    Reading,
    Translation,
    Wave,
)
from serve.runtime.protocol import FloatArray, IntArray, Row, RowArray, largest_row, largest_tokens
from serve.scheduler.job import LaneKey


class Stretch(NamedTuple):
    """So many steps of the rows of a lane."""

    lane: LaneKey
    steps: int
    tokens: Sequence[int] | None  # that each row begins with, unless they are under way


class Runner:
    """The models that are served, and the rows that decode on them now."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = dict(models)  # by key
        self._batches: dict[LaneKey, DecodeBatch] = {}
        self._readings: dict[int, Reading] = {}  # by the number of the job
        self._searches: dict[int, Translation] = {}  # as well
        self._waves: dict[LaneKey, Wave] = {}

    def add_model(self, key: str, model: Model) -> None:
        """Calls on this model may follow."""
        self._models[key] = model

    def has_model(self, key: str) -> bool:
        return key in self._models

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone: none of its rows is left."""
        del self._models[model]

    @property
    def cache_bytes(self) -> int:
        """Cache memory that is held now."""
        batches = sum(batch.nbytes for batch in self._batches.values())
        readings = sum(reading.nbytes for reading in self._readings.values())
        return batches + readings + sum(search.nbytes for search in self._searches.values())

    def held_bytes(self, lane: LaneKey) -> int:
        """Cache memory that a lane's batch holds now."""
        return self._batches[lane].nbytes if lane in self._batches else 0

    def cache_bytes_for(self, lane: LaneKey, rows: int, positions: int) -> int:
        """The most cache memory that a batch which had so many rows may hold."""
        return self._batches_of(lane).bytes_for(positions, rows)

    def classify(self, lane: LaneKey, rows: Sequence[Row]) -> EarlyAnswers:
        """Answers to rows: texts of any length, images, or clouds of one size."""
        return self._answers(lane, _stacked(rows, self._models[lane.model].bundle.manifest))

    def promise(self, lane: LaneKey) -> float:
        """The share of answers that may differ, where they stop early in this lane."""
        calibration = self._models[lane.model].bundle.manifest.calibration
        assert calibration is not None
        return min(
            level.max_disagreement
            for level in calibration.levels
            if level.threshold == lane.threshold
        )

    def full_evaluations(self, lane: LaneKey) -> int:
        """What a row costs that takes all steps of the lane."""
        return self._models[lane.model].bundle.manifest.rung(lane.steps).nfe

    def most_lanes(self, lane: LaneKey) -> int:
        """How many rungs of the lane's model may share a call of its one-step graph."""
        mix = self._models[lane.model].mix() if lane.kind == "generate" else None
        return 1 if mix is None else mix.most_batches

    def sides(self, lane: LaneKey) -> int:
        """How many of them may go abreast."""
        mix = self._models[lane.model].mix() if lane.kind == "generate" else None
        return 1 if mix is None else mix.sides

    def read(
        self, lane: LaneKey, number: int, tokens: list[int], positions: int
    ) -> FloatArray | None:
        """Read a piece of the prompt of a job, which may come to have so many positions.

        After the last one, logits (V,) for the next token.
        """
        if number not in self._readings:
            self._readings[number] = self._batch(lane).read(np.array(tokens, np.int64), positions)
        return self._readings[number].advance()

    def positions_read(self, number: int) -> int:
        """The positions of a job whose prompt has been read."""
        return self._readings[number].positions

    def join(self, lane: LaneKey, number: int) -> None:
        """A job whose prompt has been read becomes the last row."""
        self._waves.pop(lane, None)
        self._batch(lane).join(self._readings[number])
        del self._readings[number]

    def runs_ahead(self, lane: LaneKey) -> bool:
        """Whether a row of this lane, alone, may run ahead of itself."""
        mix = self._models[lane.model].mix()
        return mix is not None and mix.runs_ahead

    def wave(self, lane: LaneKey, lead: int) -> Wave:
        """The lane's only row, running ahead; what is under way goes on if the lead is the same."""
        wave = self._waves.get(lane)
        if wave is None or wave.lead != lead:
            mix = self._models[lane.model].mix()
            assert mix is not None, "a lane whose rows do not run ahead"
            wave = self._waves[lane] = mix.wave(self._batches[lane], lead)
        return wave

    def begin(self, tokens: Mapping[LaneKey, Sequence[int]]) -> None:
        """Give each row of these lanes, if there are any, its token before the first step."""
        if not tokens:
            return
        for lane in tokens:
            self._waves.pop(lane, None)
        self._mix(tokens).begin(
            [self._batches[lane] for lane in tokens],
            [np.array(some, np.int64) for some in tokens.values()],
        )

    def advance(self, lanes: Sequence[LaneKey]) -> None:
        """One step of the rows of these lanes, in one call."""
        self._mix(lanes).advance([self._batches[lane] for lane in lanes])

    def abreast(self, sides: Sequence[Sequence[Stretch]]) -> dict[LaneKey, Outcome]:
        """Each side stretch after stretch, all at once."""
        mix = self._mix(stretch.lane for side in sides for stretch in side)
        found = mix.abreast([[self._leg(stretch) for stretch in side] for side in sides])
        return {
            stretch.lane: outcome
            for side, outcomes in zip(sides, found, strict=True)
            for stretch, outcome in zip(side, outcomes, strict=True)
        }

    def end(self, lanes: Sequence[LaneKey]) -> dict[LaneKey, Outcome]:
        """Logits (B, V) of the rows of each of these lanes, if any, after the last step."""
        found = self._mix(lanes).end([self._batches[lane] for lane in lanes]) if lanes else []
        return dict(zip(lanes, found, strict=True))

    def decode(self, lane: LaneKey, tokens: Sequence[int]) -> FloatArray:
        """Give each row its token; logits (B, V) for the tokens after them."""
        self._waves.pop(lane, None)
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
        """Free what jobs that are over have read or searched; they may never have begun."""
        for number in numbers:
            self._readings.pop(number, None)
            self._searches.pop(number, None)

    def lengths(self, lane: LaneKey) -> list[int]:
        """The cached positions of each row."""
        return self._batches[lane].lengths if lane in self._batches else []

    def remove(self, lane: LaneKey, rows: Sequence[int]) -> None:
        """Drop rows in this order; a batch without rows gives its memory back."""
        if lane not in self._batches:
            return
        if rows:
            self._waves.pop(lane, None)
        batch = self._batches[lane]
        for row in rows:
            batch.remove(row)
        if not batch.lengths:
            del self._batches[lane]

    def abandon(self, lane: LaneKey) -> None:
        """Drop a lane's batch, whatever state it is in."""
        self._waves.pop(lane, None)
        self._batches.pop(lane, None)

    def check(self, lane: LaneKey) -> None:
        """A small call of a lane, whose answer nobody reads."""
        manifest = self._models[lane.model].bundle.manifest
        if lane.kind == "classify":
            self._answers(lane, largest_row(manifest)[None])
            return
        batch = self._batches_of(lane).open_batch()
        batch.add(largest_tokens(manifest)[:1])
        if manifest.text_input.max_tokens > 1:
            batch.step(largest_tokens(manifest)[:1])
        batch.remove(0)

    def opening(self, lane: LaneKey) -> bool:
        """From any thread: whether the call that runs opens a graph of the lane's model."""
        model = self._models.get(lane.model)  # which may have gone right after the call
        return model is not None and model.opening

    def interrupt(self, lane: LaneKey) -> None:
        """From any thread: let calls of the lane's model throw as soon as they can."""
        model = self._models.get(lane.model)
        if model is not None:
            model.interrupt()

    def resume(self, lane: LaneKey) -> None:
        """Let calls of the lane's model run again."""
        self._models[lane.model].resume()

    def _answers(self, lane: LaneKey, stacked: RowArray) -> EarlyAnswers:
        model = self._models[lane.model]
        if lane.traced:
            return model.step_classifier(lane.steps).traced(stacked, lane.threshold)
        if lane.threshold is not None:
            return model.step_classifier(lane.steps).early(stacked, lane.threshold)
        logits = model.classifier(lane.steps).run(stacked)  # (B, C), or (B, N, C)
        nfe = model.bundle.manifest.rung(lane.steps).nfe
        return EarlyAnswers(logits, np.full(len(stacked), nfe, dtype=np.int64))

    def _batch(self, lane: LaneKey) -> DecodeBatch:
        if lane not in self._batches:
            self._batches[lane] = self._batches_of(lane).open_batch()
        return self._batches[lane]

    def _leg(self, stretch: Stretch) -> Leg:
        tokens = None
        if stretch.tokens is not None:
            self._waves.pop(stretch.lane, None)
            tokens = np.array(stretch.tokens, np.int64)
        return Leg(self._batches[stretch.lane], stretch.steps, tokens)

    def _mix(self, lanes: Iterable[LaneKey]) -> Mix:
        """Of the model that these lanes are of."""
        mix = self._models[next(iter(lanes)).model].mix()
        assert mix is not None, "lanes that do not go step by step"
        return mix

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
