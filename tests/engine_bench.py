"""An engine on a fake model, and callers that wait for it, for the tests of the engine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from serve.catalog import Catalog
from serve.engine.classify import Classification
from serve.engine.engine import Engine, StallLimits
from serve.engine.job import (
    ClassifiedEvent,
    Event,
    FailedEvent,
    GeneratedEvent,
    Job,
    LaneKey,
    Limits,
    TokenEvent,
)
from serve.engine.search import Translation
from serve.engine.writing import Generation, GenerationRequest, Sampling
from serve.errors import ServeError
from serve.metrics import Metrics
from tests.fake_model import Mood, fake_catalog
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, translate_bundle

GREEDY = Sampling(temperature=0.0)
# Tests hold calls up; only those that are about it say for how long that is all right.
_PATIENT = StallLimits(stall_s=60, stall_unknown_s=60)
WINDOW = generate_bundle().manifest.text_input.max_tokens


class Caller:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.over = threading.Event()

    def deliver(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, TokenEvent):
            assert not self.over.is_set(), "a second end"
            self.over.set()

    def last(self) -> Event:
        assert self.over.wait(10), "no end came"
        return self.events[-1]

    def error(self) -> ServeError:
        event = self.last()
        assert isinstance(event, FailedEvent)
        return event.error


class Bench:
    """An engine on fakes, and requests for it."""

    def __init__(
        self,
        mood: Mood,
        limits: Limits,
        patience: StallLimits = _PATIENT,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.mood = mood
        self.catalog: Catalog = fake_catalog(
            mood, classify_bundle(), generate_bundle(), translate_bundle()
        )
        self.metrics = Metrics()
        self.engine = Engine(self.catalog, limits, self.metrics, patience=patience, leave=leave)

    def classify(self, *lengths: int, steps: int = 2) -> tuple[Job, Caller]:
        caller = Caller()
        rows = [[1] * length for length in lengths]
        lane = LaneKey(self.catalog.find("tiny-classify").key, "classify", steps)
        job: Job = Job(lane, Classification(rows, caller.deliver), lengths)
        self.engine.submit(job)
        return job, caller

    def generate(
        self, prompt: str = "abc", max_tokens: int = 4, steps: int = 2, **wish: Any
    ) -> tuple[Job, Caller]:
        caller = Caller()
        served = self.catalog.find("tiny-generate")
        codec = served.codec
        tokens = codec.encode_prompt(prompt)
        what = GenerationRequest(tokens, max_tokens, WINDOW, **({"sampling": GREEDY} | wish))
        job: Job = Job(
            LaneKey(served.key, "generate", steps),
            Generation(what, codec, caller.deliver),
            (len(tokens),),
            min(len(tokens) + max_tokens, WINDOW),
        )
        self.engine.submit(job)
        return job, caller

    def search(
        self, prompt: str = "abc", max_tokens: int = 4, num_beams: int = 3, **wish: Any
    ) -> tuple[Job, Caller]:
        caller = Caller()
        served = self.catalog.find("tiny-translate")
        codec = served.codec
        tokens = codec.encode_prompt(prompt)
        what = GenerationRequest(tokens, max_tokens, 24, GREEDY, num_beams=num_beams, **wish)
        job: Job = Job(
            LaneKey(served.key, "search", 2),
            Translation(what, codec, caller.deliver),
            (len(tokens),),
            len(tokens),
            tokens_left=max_tokens,
            beams=num_beams,
        )
        self.engine.submit(job)
        return job, caller

    def idle(self) -> bool:
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            if not (self.engine.queued or self.engine.running or self.engine.cache_bytes):
                return self.mood.open_rows == 0
            time.sleep(0.002)
        return False


@contextmanager
def running(**limits: Any) -> Iterator[Bench]:
    bench = Bench(Mood(), Limits(**limits))
    bench.engine.start()
    try:
        yield bench
    finally:
        bench.mood.gate.set()
        bench.engine.stop()


def generated(caller: Caller) -> GeneratedEvent:
    event = caller.last()
    assert isinstance(event, GeneratedEvent), event
    return event


def classified(caller: Caller) -> ClassifiedEvent:
    event = caller.last()
    assert isinstance(event, ClassifiedEvent), event
    return event
