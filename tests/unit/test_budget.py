"""Budgets become rungs; what cannot be is refused with the ladder named."""

from dataclasses import replace

import pytest

from serve.budget import Ask, decide
from serve.bundle import Calibration, Level
from serve.errors import ImpossibleBudget, NotCalibrated
from tests.tiny_folders import classify_bundle

MANIFEST = classify_bundle().manifest


def test_steps_are_taken_exactly() -> None:
    decision = decide(Ask(steps=2), MANIFEST)
    assert (decision.steps, decision.reason, decision.full.steps) == (2, "exact", 4)


def test_effort_names_a_rung() -> None:
    decision = decide(Ask(effort="low"), MANIFEST)
    assert (decision.steps, decision.reason) == (1, "effort")
    assert decide(Ask(effort="max"), MANIFEST).steps == MANIFEST.full_steps


def test_no_budget_gets_the_default() -> None:
    decision = decide(Ask(), replace(MANIFEST, default_steps=2))
    assert (decision.steps, decision.reason) == (2, "default")


def test_a_missing_rung_is_refused_with_the_ladder() -> None:
    with pytest.raises(
        ImpossibleBudget, match="no rung of 3 steps; its ladder has 1, 2, 4"
    ) as error:
        decide(Ask(steps=3), MANIFEST)
    assert error.value.param == "steps"
    assert error.value.details == {"ladder": [1, 2, 4]}


def test_a_missing_effort_is_refused_with_the_efforts() -> None:
    with pytest.raises(
        ImpossibleBudget, match=r"efforts, with their steps, are low \(1\)"
    ) as error:
        decide(Ask(effort="high"), MANIFEST)
    assert error.value.param == "effort"
    assert error.value.details["efforts"] == {"low": 1, "medium": 2, "max": 4}


def test_a_ladder_without_efforts_says_so() -> None:
    rungs = tuple(replace(rung, effort=None) for rung in MANIFEST.rungs)
    with pytest.raises(ImpossibleBudget, match="it names no efforts; its ladder has 1, 2, 4"):
        decide(Ask(effort="low"), replace(MANIFEST, rungs=rungs))


CALIBRATED = replace(
    MANIFEST,
    calibration=Calibration(
        rows=3000,
        confidence=0.95,
        source="made up",
        levels=(
            Level(0.002, None, 4.0, 0.0),
            Level(0.01, 3.0, 2.0, 0.005),
            Level(0.05, 1.0, 1.5, 0.03),
        ),
    ),
)


@pytest.mark.parametrize(
    ("allowed", "threshold"),
    [
        (0.001, None),
        (0.002, None),
        (0.009, None),
        (0.01, 3.0),
        (0.0499, 3.0),
        (0.05, 1.0),
        (0.9, 1.0),
    ],
)
def test_an_allowed_disagreement_takes_the_stricter_level(
    allowed: float, threshold: float | None
) -> None:
    decision = decide(Ask(max_disagreement=allowed), CALIBRATED)
    assert (decision.steps, decision.reason) == (4, "disagreement")
    assert decision.threshold == threshold


def test_a_model_that_was_not_calibrated_refuses_disagreement() -> None:
    with pytest.raises(NotCalibrated, match="tiny-classify cannot promise") as error:
        decide(Ask(max_disagreement=0.01), MANIFEST)
    assert (error.value.code, error.value.param) == ("not_calibrated", "max_disagreement")


@pytest.mark.parametrize("other", [Ask(1, None, 0.01), Ask(None, "low", 0.01)])
def test_disagreement_and_named_steps_are_refused(other: Ask) -> None:
    with pytest.raises(ImpossibleBudget, match="lets the server choose the steps"):
        decide(other, CALIBRATED)


def test_steps_and_effort_together_are_refused() -> None:
    with pytest.raises(ImpossibleBudget, match="send one of them"):
        decide(Ask(steps=1, effort="low"), MANIFEST)
