"""The limit on cache memory holds on the real runtime, whose buffers grow and shrink by leaps."""

import random
import threading
import time

import pytest

from serve.catalog import Catalog, Served
from serve.engine import Engine
from serve.events import Event, GeneratedEvent, TokenEvent
from serve.executor import Work
from serve.generation import Generation, Wish
from serve.job import Job, LaneKey
from serve.metrics import Metrics
from serve.runtime import DecodeBatch, Decoder, Model, open_model
from serve.runtime.protocol import FloatArray, IntArray
from serve.sampling import Sampling
from serve.scheduler import Limits
from serve.text import TextCodec
from tests.tiny_folders import generate_bundle

WINDOW = generate_bundle().manifest.text_input.max_tokens


class Ledger:
    """The memory of every batch there is, and the most there has been."""

    def __init__(self) -> None:
        self.batches: list[DecodeBatch] = []
        self.most_bytes = 0
        self.most_rows = 0

    def note(self) -> None:
        self.batches = [batch for batch in self.batches if batch.lengths]
        self.most_bytes = max(self.most_bytes, sum(batch.nbytes for batch in self.batches))
        self.most_rows = max(self.most_rows, sum(len(batch.lengths) for batch in self.batches))


class WatchedBatch:
    def __init__(self, batch: DecodeBatch, ledger: Ledger) -> None:
        self._batch, self._ledger = batch, ledger

    @property
    def lengths(self) -> list[int]:
        return self._batch.lengths

    @property
    def nbytes(self) -> int:
        return self._batch.nbytes

    def add(self, tokens: IntArray) -> FloatArray:
        if not self._batch.lengths:
            self._ledger.batches.append(self._batch)
        logits = self._batch.add(tokens)
        self._ledger.note()
        return logits

    def step(self, tokens: IntArray) -> FloatArray:
        logits = self._batch.step(tokens)
        self._ledger.note()
        return logits

    def extend(self, row: int, tokens: IntArray) -> FloatArray:
        logits = self._batch.extend(row, tokens)
        self._ledger.note()
        return logits

    def remove(self, row: int) -> None:
        self._batch.remove(row)
        self._ledger.note()


class WatchedDecoder:
    def __init__(self, decoder: Decoder, ledger: Ledger) -> None:
        self._decoder, self._ledger = decoder, ledger

    def open_batch(self) -> WatchedBatch:
        return WatchedBatch(self._decoder.open_batch(), self._ledger)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return self._decoder.bytes_for(positions, rows)

    def forward(self, tokens: IntArray) -> FloatArray:
        return self._decoder.forward(tokens)


class WatchedModel:
    def __init__(self, model: Model, ledger: Ledger) -> None:
        self._model, self._ledger = model, ledger
        self.bundle = model.bundle
        self.classifier = model.classifier
        self.step_classifier = model.step_classifier
        self.translator = model.translator
        self.warm_up = model.warm_up

    def decoder(self, steps: int) -> WatchedDecoder:
        return WatchedDecoder(self._model.decoder(steps), self._ledger)


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_holds_at_every_call(seed: int) -> None:
    chance, ledger = random.Random(seed), Ledger()
    bundle = generate_bundle()
    model = WatchedModel(open_model(bundle, threads=1), ledger)
    served = Served(bundle, model, TextCodec(bundle))
    limit = 7 * model.decoder(4).bytes_for(WINDOW)
    engine = Engine(Catalog([served]), Limits(cache_bytes=limit, decode_rows=8), Metrics())
    engine.start()
    over = threading.Semaphore(0)
    answers: list[Event] = []

    def deliver(event: Event) -> None:
        if not isinstance(event, TokenEvent):
            answers.append(event)
            over.release()

    jobs = []
    for _ in range(60):
        prompt = [1] * chance.randint(1, WINDOW)
        max_tokens = chance.choice([1, 5, 40, 200])
        wish = Wish(prompt, max_tokens, WINDOW, Sampling(temperature=0.0))
        job: Job[Work] = Job(
            LaneKey("tiny-generate", "generate", chance.choice([1, 2, 4, 4])),
            Generation(wish, served.codec, deliver),
            (len(prompt),),
            min(len(prompt) + max_tokens, WINDOW),
        )
        engine.submit(job)
        jobs.append(job)
    for job in chance.sample(jobs, 10):
        engine.cancel(job)
    for _ in range(50):
        assert over.acquire(timeout=60), "a request got no answer"
    end_s = time.monotonic() + 10
    while engine.cache_bytes:
        assert time.monotonic() < end_s, "memory is still held"
        time.sleep(0.005)
    engine.stop()
    assert sum(isinstance(answer, GeneratedEvent) for answer in answers) >= 50
    assert ledger.most_rows > 2 and 0 < ledger.most_bytes <= limit
