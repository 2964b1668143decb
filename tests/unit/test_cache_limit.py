"""The limit on cache memory holds on the real runtime, whose buffers grow and shrink by leaps."""

import random
import threading
import time

import pytest

from serve.catalog import Catalog, Served
from serve.engine.backlog import GenerationSize
from serve.engine.engine import Engine
from serve.engine.generate import GenerateLane
from serve.engine.job import Deadline, Event, GeneratedEvent, Job, LaneKey, Limits, TokenEvent
from serve.engine.loaded import Call
from serve.engine.writing import Generation, GenerationRequest, Sampling
from serve.inputs.text import TextCodec
from serve.metrics import Metrics
from serve.runtime import open_model
from tests.fixtures.tiny_folders import generate_bundle
from tests.waiting import wait_until

WINDOW = generate_bundle().manifest.text_input.max_tokens


class Ledger:
    """The most memory and rows that any call has left behind."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most_bytes = self.most_rows = 0
        step = Engine.step

        def watched(engine: Engine) -> Call | None:
            call = step(engine)
            self.most_bytes = max(self.most_bytes, engine.cache_bytes)
            lanes = engine._common.cached()
            rows = sum(len(lane.rows) for lane in lanes if isinstance(lane, GenerateLane))
            self.most_rows = max(self.most_rows, rows)
            return call

        patch.setattr(Engine, "step", watched)


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_holds_at_every_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, ledger = random.Random(seed), Ledger(monkeypatch)
    bundle = generate_bundle()
    model = open_model(bundle, threads=1)
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
        wish = GenerationRequest(prompt, max_tokens, WINDOW, Sampling(temperature=0.0))
        job: Job = Job(
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
    wait_until(lambda: not engine.cache_bytes, "memory is not given back")
    engine.stop()
    assert sum(isinstance(answer, GeneratedEvent) for answer in answers) >= 50
    assert ledger.most_rows > 2 and 0 < ledger.most_bytes <= limit


@pytest.mark.parametrize("given_s", [None, 60.0])
def test_of_the_steps_that_may_be_chosen_those_are_left_out_that_do_not_fit(
    given_s: float | None,
) -> None:
    bundle = generate_bundle()
    model = open_model(bundle, threads=1)
    served = Served(bundle, model, TextCodec(bundle))
    limit = model.decoder(2).bytes_for(WINDOW)
    assert model.decoder(4).bytes_for(WINDOW) > limit
    engine = Engine(Catalog([served]), Limits(cache_bytes=limit), Metrics())
    deadline = None if given_s is None else Deadline(time.perf_counter(), given_s)

    def chosen(tokens: int) -> int:
        size = GenerationSize(5, tokens, window=WINDOW)
        lane = LaneKey("tiny-generate", "generate", 4)
        return engine.steps_for(lane, (1, 2, 4), size, deadline)

    assert [chosen(tokens) for tokens in (1, WINDOW)] == [4, 2]
    model.close()
