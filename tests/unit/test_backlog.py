"""How long an answer would take, asked for now: `predicted_ms` of the ladder."""

import pytest

from serve.bundle import LatencyEntry
from serve.engine.cost import CostKey
from serve.engine.job import LaneKey, Limits
from tests.stepped import SteppedEngine, classification, generation

LANE = LaneKey("c", "classify", 1)
OTHER = LaneKey("g", "generate", 1)
MEASURED = LatencyEntry(
    steps=1, kind="classify", batch=1, length=100, median_ms=500.0, p95_ms=600.0
)


def engine(known: bool = True) -> SteppedEngine:
    found = SteppedEngine(Limits(batch_rows=2))
    if known:
        found.model("c").cost.observe_usual((LANE, "classify"), 0.010)
        found.model("g").cost.observe_usual((OTHER, "prefill"), 0.002)
    return found


def test_rounds_of_what_is_busy_are_counted() -> None:
    s = engine()
    assert s.predict_s(LANE, None) == pytest.approx(0.010)
    s.submit(classification(LANE, (10,) * 8, lambda event: None))
    s.submit(generation(OTHER, 5, 5, lambda event: None))
    assert s.predict_s(LANE, None) == pytest.approx(5 * 0.012)


def test_what_is_known_best_is_believed() -> None:
    assert engine(known=False).predict_s(LANE, None) is None
    assert engine(known=False).predict_s(LANE, MEASURED) == 0.5
    s = engine()
    assert s.predict_s(LANE, MEASURED) == 0.5
    for _ in range(50):
        s.model("c").cost.observe(CostKey("classify", 1), 1, 100, 0.2)
    # Neither what another machine took, nor calls of whatever size.
    assert s.predict_s(LANE, MEASURED) == pytest.approx(0.2, rel=0.1)
    assert s.predict_s(LaneKey("gone", "classify", 1), MEASURED) is None
