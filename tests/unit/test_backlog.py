"""How long an answer would take, asked for now: `predicted_ms` of the ladder."""

import pytest

from serve.bundle import LatencyEntry
from serve.engine.cost import CostKey, LatencyModel
from serve.engine.job import Job, LaneKey, Limits, Turn
from serve.engine.scheduler import Scheduler

LANE = LaneKey("m", "classify", 1)
OTHER = LaneKey("g", "generate", 1)
USUAL: dict[Turn, float] = {(LANE, "classify"): 0.010, (OTHER, "prefill"): 0.002}
MEASURED = LatencyEntry(
    steps=1, kind="classify", batch=1, length=100, median_ms=500.0, p95_ms=600.0
)


def scheduler(usual: dict[Turn, float], latency: LatencyModel | None = None) -> Scheduler[str]:
    return Scheduler(
        Limits(batch_rows=2), lambda *_: 0, latency=latency, usual_s=lambda turn: usual.get(turn)
    )


def test_rounds_of_what_is_busy_are_counted() -> None:
    s = scheduler(USUAL)
    assert s.backlog.answer_s(LANE, None) == pytest.approx(0.010)
    s.add(Job(LANE, "a", (10,) * 8), 0.0)
    s.add(Job(OTHER, "b", (5,), 10), 0.0)
    assert s.backlog.answer_s(LANE, None) == pytest.approx(5 * 0.012)


def test_what_is_known_best_is_believed() -> None:
    assert scheduler({}).backlog.answer_s(LANE, None) is None
    assert scheduler({}).backlog.answer_s(LANE, MEASURED) == 0.5
    assert scheduler(USUAL).backlog.answer_s(LANE, MEASURED) == 0.5
    latency = LatencyModel()
    for _ in range(50):
        latency.observe(CostKey("m", "classify", 1), 1, 100, 0.2)
    # Neither what another machine took, nor calls of whatever size.
    found = scheduler(USUAL, latency).backlog.answer_s(LANE, MEASURED)
    assert found == pytest.approx(0.2, rel=0.1)
