"""Budgets become rungs; what cannot be is refused with the ladder named."""

from dataclasses import replace

import pytest

from serve.budget import Ask, decide
from serve.errors import ImpossibleBudget
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


def test_steps_and_effort_together_are_refused() -> None:
    with pytest.raises(ImpossibleBudget, match="send one of them"):
        decide(Ask(steps=1, effort="low"), MANIFEST)
