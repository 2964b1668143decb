"""Early answers are run again at all steps when there is time, and what differs is counted."""

import time
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from serve.bundle import Calibration, Level
from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.execute import Rechecks
from serve.engine.job import ClassifiedEvent, Job, LaneKey, Limits
from serve.engine.work import Classification
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
            assert isinstance(answer, ClassifiedEvent) and answer.evaluations == (1,) * PART
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
        engine._scheduler.add(Job(lane, Classification([[1] * 4] * 8, caller.deliver), (4,) * 8), 0)
    engine.start()
    try:
        for caller in callers:
            caller.last()
        assert count(metrics.registry, "rechecked") == 0
        assert len(engine._rechecks._waiting) == 64
    finally:
        engine.stop()


def offered(rechecks: Rechecks, lane: LaneKey, rows: list[Row], early: bool) -> None:
    for row in rows:
        rechecks.offer(lane, row, np.array([0.0, 1.0], np.float32), early)


def test_a_share_of_the_answers_is_drawn_and_one_of_all_steps_agrees_with_itself() -> None:
    metrics, lane = Metrics(), LaneKey("sure", "classify", 4, threshold=0.5)
    rechecks = Rechecks(0.25, lambda lane: 0.01, metrics)
    offered(rechecks, lane, [[1]] * 4000, early=False)
    drawn = count(metrics.registry, "rechecked")
    assert 800 < drawn < 1200  # 7 standard deviations about 1000
    assert count(metrics.registry, "disagreed") == 0
    assert not rechecks.waiting
    offered(Rechecks(0.0, lambda lane: 0.01, metrics), lane, [[1]] * 100, early=False)
    assert count(metrics.registry, "rechecked") == drawn


def test_only_the_rows_of_a_model_that_is_gone_are_forgotten() -> None:
    here, gone = (LaneKey(name, "classify", 4, threshold=0.5) for name in ("here", "gone@1"))
    rechecks = Rechecks(1.0, lambda lane: 0.01, Metrics())
    offered(rechecks, here, [[1]], early=True)
    offered(rechecks, gone, [[2], [3]], early=True)
    offered(rechecks, here, [[4]], early=True)
    rechecks.drop_model("gone@1")
    assert [rechecks.take().row for _ in range(2)] == [[1], [4]]
    assert not rechecks.waiting
