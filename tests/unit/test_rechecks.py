"""Early answers are run again at all steps when there is time, and what differs is counted."""

import time
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from serve.bundle import Calibration, Level
from serve.catalog import Catalog, Served
from serve.engine.classify import Classification, ClassifyLane, Rechecks
from serve.engine.engine import Engine
from serve.engine.job import ClassifiedEvent, Job, LaneKey, Limits
from serve.engine.loaded import Common, EngineModel, new_cost
from serve.metrics import Metrics
from serve.runtime import open_model
from serve.runtime.protocol import Row
from tests.engine_bench import Caller
from tests.fixtures.tiny_bundles import build_classify

ROWS = 200  # of two tokens; some are answered differently after one step
PART = 50  # fewer than may wait
# The two levels ask for the same certainty: what holds is the stricter promise.
LEVELS = (Level(0.01, 0.0, 1.0, 0.01), Level(0.05, 0.0, 1.0, 0.01))


def count(registry: CollectorRegistry, name: str) -> float:
    labels = {"model": "sure", "max_disagreement": "0.01"}
    return registry.get_sample_value(f"stepdial_{name}_total", labels) or 0.0


def test_answers_that_differ_from_those_of_all_steps_are_counted(tmp_path: Path) -> None:
    bundle = build_classify(
        tmp_path / "b", name="sure", calibration=Calibration(3000, 0.95, "made up", LEVELS)
    )
    served = Served.open(bundle, open_model(bundle, 1))
    draw = np.random.default_rng(0)
    high = bundle.manifest.text_tokenizer.vocab_size
    tokens = draw.integers(1, high, (ROWS, 2))
    jumps = served.model.step_classifier(4).jumps(tokens)  # (4, ROWS, C)
    differing = int((jumps[0].argmax(-1) != jumps[-1].argmax(-1)).sum())
    assert 0 < differing < ROWS
    metrics = Metrics()
    engine = Engine(Catalog([served]), Limits(), metrics, recheck_share=1.0)
    engine.start()
    try:
        for part in range(0, ROWS, PART):
            caller = Caller()
            work = Classification(tokens[part : part + PART].tolist(), caller.deliver)
            lane = LaneKey("sure", "classify", 4, threshold=0.0)
            engine.submit(Job(lane, work, (2,) * PART))
            answer = caller.last()
            assert isinstance(answer, ClassifiedEvent) and answer.spent == ((1, 1),) * PART
            until_s = time.monotonic() + 30
            while count(metrics.registry, "rechecked") < part + PART:
                assert time.monotonic() < until_s
                time.sleep(0.01)
    finally:
        engine.stop()
    assert count(metrics.registry, "rechecked") == ROWS
    assert count(metrics.registry, "disagreed") == differing


def test_a_busy_engine_checks_nothing_and_holds_few_rows(tmp_path: Path) -> None:
    bundle = build_classify(
        tmp_path / "b", name="sure", calibration=Calibration(3000, 0.95, "made up", LEVELS)
    )
    served = Served.open(bundle, open_model(bundle, 1))
    metrics = Metrics()
    engine = Engine(Catalog([served]), Limits(), metrics, recheck_share=1.0)
    callers = []
    for _ in range(10):  # before the start, so that all of it waits
        caller = Caller()
        callers.append(caller)
        lane = LaneKey("sure", "classify", 4, threshold=0.0)
        job = Job(lane, Classification([[1] * 4] * 8, caller.deliver), (4,) * 8)
        engine._jobs.add(job, engine._lane(job), 0)
    engine.start()
    try:
        for caller in callers:
            caller.last()
        assert count(metrics.registry, "rechecked") == 0
        one = engine._models["sure"].lanes[lane]
        assert isinstance(one, ClassifyLane) and len(one.rechecks.waiting) == 64
    finally:
        engine.stop()


def offered(rechecks: Rechecks, lane: LaneKey, rows: list[Row], early: bool) -> None:
    for row in rows:
        rechecks.offer(lane, row, np.array([0.0, 1.0], np.float32), early)


def test_a_share_of_the_answers_is_drawn_and_one_of_all_steps_agrees_with_itself(
    tmp_path: Path,
) -> None:
    bundle = build_classify(
        tmp_path / "b", name="sure", calibration=Calibration(3000, 0.95, "made up", LEVELS)
    )
    served = Served.open(bundle, open_model(bundle, 1))
    metrics, lane = Metrics(), LaneKey("sure", "classify", 4, threshold=0.0)
    model = EngineModel(served, new_cost(served), Common(Limits(), metrics, time.monotonic))
    rechecks = Rechecks(model, 0.25)
    offered(rechecks, lane, [[1]] * 4000, early=False)
    drawn = count(metrics.registry, "rechecked")
    assert 800 < drawn < 1200  # 7 standard deviations about 1000
    assert count(metrics.registry, "disagreed") == 0
    assert not rechecks.waiting
    offered(Rechecks(model, 0.0), lane, [[1]] * 100, early=False)
    assert count(metrics.registry, "rechecked") == drawn
