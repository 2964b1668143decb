"""An engine without a thread, on a clock of its own: each call is planned and run when a test asks.

Everything is real but the models, which only count rows and may let time pass. A classifier is
called `c`, generators `g` and `h`, a translator `t`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import cast

import numpy as np

from serve.bundle import Bundle, Latency
from serve.catalog import Catalog, Served
from serve.engine.classify import Classification
from serve.engine.engine import Engine
from serve.engine.generate import DecodePart, GenerateLane
from serve.engine.job import Event, Job, LaneKey, Limits, Work
from serve.engine.loaded import Call, EngineModel
from serve.engine.search import Translation
from serve.engine.writing import Generation, GenerationRequest, Sampling
from serve.inputs.text import TextCodec
from serve.metrics import Metrics
from serve.runtime import DecodeBatch, EarlyAnswers, Model, Prefill, Speculation
from serve.runtime.protocol import FloatArray, IntArray, RowArray
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, translate_bundle

# Called during a call of this kind, steps, rows and length; may raise.
During = Callable[[str, int, int, int], None]
TOKEN, VOCABULARY = 5, 8  # every token that is written
WINDOW = 100_000
GREEDY = Sampling(temperature=0.0)


class CountedBatch:
    """Rows that only have lengths."""

    def __init__(self, steps: int, model: "CountedModel") -> None:
        self.lengths: list[int] = []
        self.steps = steps
        self.held_bytes: int | None = None  # instead of what the rows take
        self.step_now: int | None = None  # None: between two tokens
        self._model = model

    @property
    def nbytes(self) -> int:
        if self.held_bytes is not None:
            return self.held_bytes
        return len(self.lengths) * max(self.lengths, default=0) * self.steps

    def read(self, tokens: IntArray, positions: int = 0) -> "CountedPrefill":
        return CountedPrefill(self.steps, len(tokens), self._model)

    def join(self, prefill: Prefill) -> None:
        assert self.step_now is None, "a row joins between two tokens"
        self.lengths.append(prefill.positions)

    def remove(self, row: int) -> None:
        assert self.step_now is None, "a row leaves between two tokens"
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()

    def step(self, tokens: IntArray) -> FloatArray:
        assert self.step_now is None and tokens.shape == (len(self.lengths),)
        self._model.during("decode", self.steps, len(tokens), max(self.lengths))
        return self._grown()

    def begin(self, tokens: IntArray) -> None:
        assert self.step_now is None and tokens.shape == (len(self.lengths),)
        self.step_now = 0

    def advance(self) -> None:
        assert self.step_now is not None and self.step_now < self.steps
        self.step_now += 1

    def end(self) -> FloatArray:
        assert self.step_now == self.steps
        self.step_now = None
        return self._grown()

    def add(self, tokens: IntArray) -> FloatArray:
        self.lengths.append(len(tokens))
        logits: FloatArray = self._model.logits(1)[0]
        return logits

    def _grown(self) -> FloatArray:
        assert max(self.lengths) < self._model.window, "a full row was decoded"
        self.lengths = [length + 1 for length in self.lengths]
        return self._model.logits(len(self.lengths))


class CountedPrefill:
    def __init__(self, steps: int, positions: int, model: "CountedModel") -> None:
        self.positions = positions
        self._steps, self._model, self._pieces = steps, model, model.pieces

    @property
    def nbytes(self) -> int:
        return self.positions * self._steps

    def advance(self) -> FloatArray | None:
        self._pieces -= 1
        self._model.during("prefill", self._steps, 1, self.positions)
        return None if self._pieces > 0 else self._model.logits(1)[0]


class CountedMix:
    can_speculate = False

    def __init__(self, model: "CountedModel") -> None:
        self.most_batches = model.most_lanes
        self._model = model

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        for batch, some in zip(batches, tokens, strict=True):
            _counted(batch).begin(some)

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        assert 0 < len(batches) <= self.most_batches
        rows = sum(len(batch.lengths) for batch in batches)
        self._model.during("decode", 1, rows, max(max(batch.lengths) for batch in batches))
        for batch in batches:
            _counted(batch).advance()

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        return [_counted(batch).end() for batch in batches]

    def speculation(self, batch: DecodeBatch, lead: int) -> Speculation:
        raise NotImplementedError("no row runs ahead")


class CountedSearch:
    def __init__(self, steps: int, source: IntArray, model: "CountedModel") -> None:
        self._steps, self._source, self._model = steps, source, model

    @property
    def nbytes(self) -> int:
        return len(self._source) * self._steps

    def follow(self, prefixes: IntArray) -> FloatArray:
        rows, length = prefixes.shape
        kind = "prefill" if length == 1 else "search"
        length = len(self._source) if length == 1 else length
        self._model.during(kind, self._steps, rows, length)
        logits = self._model.logits(rows)
        logits[:, VOCABULARY - 1] = 0.5  # several beams
        return logits


class CountedRung:
    """One rung, of whatever task."""

    def __init__(self, steps: int, model: "CountedModel") -> None:
        self._steps, self._model = steps, model

    def run(self, rows: RowArray) -> FloatArray:
        self._model.during("classify", self._steps, rows.shape[0], rows.shape[1])
        return self._model.logits(len(rows))[:, :2]

    def open_batch(self) -> CountedBatch:
        return CountedBatch(self._steps, self._model)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return rows * positions * self._steps

    def read(self, source: IntArray) -> CountedSearch:
        return CountedSearch(self._steps, source, self._model)


class CountedModel:
    """Behind the engine's part of the runtime's protocol."""

    opening, most_parts, window = False, 1, WINDOW
    spoils = False  # whether the first row of a call comes out as no number

    def __init__(self, bundle: Bundle, during: During, most_lanes: int, pieces: int) -> None:
        self.bundle, self.during, self.pieces = bundle, during, pieces
        self.most_lanes = most_lanes

    def classifier(self, steps: int) -> CountedRung:
        return CountedRung(steps, self)

    decoder = translator = classifier

    def step_classifier(self, steps: int) -> EarlyAnswers:
        raise NotImplementedError("nothing is answered early")

    def logits(self, rows: int) -> FloatArray:
        """Logits (B, V) of rows."""
        logits = np.zeros((rows, VOCABULARY), np.float32)
        logits[:, TOKEN] = 1.0
        logits[0, 0] = np.nan if self.spoils else 0.0
        return logits

    def mix(self) -> CountedMix | None:
        return CountedMix(self) if self.most_lanes > 1 else None

    def close(self) -> None:
        pass


class SteppedEngine(Engine):
    """An engine whose thread is the test."""

    def __init__(
        self,
        limits: Limits,
        during: During | None = None,
        most_lanes: int | dict[str, int] = 1,
        pieces: int = 1,
        names: dict[str, str] | None = None,
        measured: Latency | None = None,
    ) -> None:
        """`names` of models, and their tasks."""
        self.now_s = 0.0

        def tick(kind: str, steps: int, rows: int, length: int) -> None:
            self.now_s += 1e-6

        during = during or tick
        served = []
        for name, task in (names or NAMES).items():
            lanes = most_lanes if isinstance(most_lanes, int) else most_lanes.get(name, 1)
            bundle = _BUNDLES[task]()
            bundle = replace(bundle, manifest=replace(bundle.manifest, name=name))
            model = CountedModel(bundle, during, lanes, pieces)
            served.append(Served.open(bundle, cast(Model, model)))
        super().__init__(Catalog(served), limits, Metrics(), clock=lambda: self.now_s)
        for one in served:
            if measured is not None:
                self.cost(one).learn(measured)

    def _check_works(self) -> None:
        """It does."""

    def model(self, name: str) -> EngineModel:
        return self._models[name]

    def lane(self, key: LaneKey) -> GenerateLane:
        lane = self._models[key.model].lanes[key]
        assert isinstance(lane, GenerateLane)
        return lane

    def rows(self, key: LaneKey) -> tuple[Job, ...]:
        """The jobs in the batch."""
        return tuple(self.lane(key).rows)

    @property
    def charged_bytes(self) -> int:
        return self._common.charged_bytes

    def jobs(self) -> list[Job]:
        """Those that have not ended, oldest first."""
        return list(self._jobs)

    def lapsed(self, now_s: float) -> list[Job]:
        """Those that would be given up now."""
        return self._late(now_s)


NAMES = {"c": "classify", "g": "generate", "h": "generate", "t": "translate"}
_BUNDLES = {
    "classify": classify_bundle,
    "generate": generate_bundle,
    "translate": translate_bundle,
}


@cache
def _codec(task: str) -> TextCodec:
    return TextCodec(_BUNDLES[task]())


def classification(
    lane: LaneKey, lengths: Sequence[int], deliver: Callable[[Event], None], **fields: object
) -> Job:
    work = Classification([[1] * length for length in lengths], deliver)
    return _job(lane, work, tuple(lengths), **fields)


def generation(
    lane: LaneKey,
    prompt: int,
    tokens: int,
    deliver: Callable[[Event], None],
    window: int = WINDOW,
    **fields: object,
) -> Job:
    what = GenerationRequest([1] * prompt, tokens, window, GREEDY)
    codec = _codec("generate")
    fields = {"positions": prompt + tokens, "tokens_left": tokens} | fields
    return _job(lane, Generation(what, codec, deliver), (prompt,), **fields)


def translation(
    lane: LaneKey,
    source: int,
    tokens: int,
    deliver: Callable[[Event], None],
    beams: int = 1,
    **fields: object,
) -> Job:
    what = GenerationRequest([TOKEN] * source, tokens, WINDOW, GREEDY, num_beams=beams)
    codec = _codec("translate")
    fields = {"positions": source, "tokens_left": tokens, "beams": beams} | fields
    return _job(lane, Translation(what, codec, deliver), (source,), **fields)


def parts(call: Call | None) -> tuple[DecodePart, ...]:
    assert call is not None and call.kind == "decode"
    return tuple(call.what)


def _job(lane: LaneKey, work: Work, lengths: tuple[int, ...], **fields: object) -> Job:
    return Job(lane, work, lengths, **fields)  # type: ignore[arg-type]  # as a job takes them


def _counted(batch: DecodeBatch) -> CountedBatch:
    assert isinstance(batch, CountedBatch)
    return batch
