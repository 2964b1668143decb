"""Budgets become rungs; what cannot be is refused with the ladder named."""

from dataclasses import replace

import pytest

from serve.budget import BudgetRequest, decide, efforts_of
from serve.bundle import EFFORTS, Calibration, Effort, Level
from serve.errors import ImpossibleBudget, NotCalibrated
from tests.fixtures.tiny_folders import classify_bundle

MANIFEST = classify_bundle().manifest


def test_steps_are_taken_exactly() -> None:
    decision = decide(BudgetRequest(steps=2), MANIFEST)
    assert (decision.steps, decision.reason, decision.full.steps) == (2, "exact", 4)


def test_effort_names_a_rung() -> None:
    decision = decide(BudgetRequest(effort="low"), MANIFEST)
    assert (decision.steps, decision.reason) == (1, "effort")
    assert decide(BudgetRequest(effort="max"), MANIFEST).steps == MANIFEST.full_steps


def test_no_budget_gets_the_default() -> None:
    decision = decide(BudgetRequest(), replace(MANIFEST, default_steps=2))
    assert (decision.steps, decision.reason) == (2, "default")


def test_a_missing_rung_is_refused_with_the_ladder() -> None:
    with pytest.raises(ImpossibleBudget, match="does not offer 3 steps; it has 1, 2, 4") as error:
        decide(BudgetRequest(steps=3), MANIFEST)
    assert error.value.param == "steps"
    assert error.value.details == {"ladder": [1, 2, 4]}


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ({"low": 1, "medium": 2, "max": 4}, (1, 2, 4, 4)),
        ({"low": 1, "medium": 2, "high": 4}, (1, 2, 4, 4)),
        ({"low": 1, "max": 4}, (1, 1, 4, 4)),
        ({"max": 1}, (1, 1, 1, 1)),
        ({"medium": 2}, (2, 2, 2, 2)),
    ],
)
def test_every_word_of_effort_means_a_rung_of_every_model(
    named: dict[Effort, int], meant: tuple[int, ...]
) -> None:
    words = {count: word for word, count in named.items()}
    rungs = tuple(replace(rung, effort=words.get(rung.steps)) for rung in MANIFEST.rungs)
    manifest = replace(MANIFEST, rungs=rungs)
    decided = [decide(BudgetRequest(effort=word), manifest) for word in EFFORTS]
    assert tuple(decision.steps for decision in decided) == meant
    assert {decision.reason for decision in decided} == {"effort"}
    assert {word: rung.steps for word, rung in efforts_of(manifest).items()} == dict(
        zip(EFFORTS, meant, strict=True)
    )


@pytest.mark.parametrize(
    ("dominated", "meant"),
    [((), (1, 2, 2, 4)), ((2,), (1, 1, 4, 4)), ((2, 4), (1, 1, 1, 1)), ((1, 2, 4), (1, 2, 2, 4))],
)
def test_where_no_rung_has_a_word_they_spread_over_those_worth_asking_for(
    dominated: tuple[int, ...], meant: tuple[int, ...]
) -> None:
    rungs = tuple(
        replace(rung, effort=None, dominated=rung.steps in dominated) for rung in MANIFEST.rungs
    )
    manifest = replace(MANIFEST, rungs=rungs)
    assert tuple(rung.steps for rung in efforts_of(manifest).values()) == meant


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
    decision = decide(BudgetRequest(max_disagreement=allowed), CALIBRATED)
    assert (decision.steps, decision.reason) == (4, "disagreement")
    assert decision.threshold == threshold


def test_a_model_that_was_not_calibrated_refuses_disagreement() -> None:
    with pytest.raises(NotCalibrated, match="tiny-classify cannot promise") as error:
        decide(BudgetRequest(max_disagreement=0.01), MANIFEST)
    assert (error.value.code, error.value.param) == ("not_calibrated", "max_disagreement")


@pytest.mark.parametrize("other", [BudgetRequest(1, None, 0.01), BudgetRequest(None, "low", 0.01)])
def test_disagreement_and_named_steps_are_refused(other: BudgetRequest) -> None:
    with pytest.raises(ImpossibleBudget, match="lets the server choose the steps"):
        decide(other, CALIBRATED)


def test_steps_and_effort_together_are_refused() -> None:
    with pytest.raises(ImpossibleBudget, match="send one of them"):
        decide(BudgetRequest(steps=1, effort="low"), MANIFEST)


def chosen(budget: BudgetRequest) -> tuple[tuple[int, ...], int, str]:
    decision = decide(budget, replace(MANIFEST, default_steps=2))
    return decision.step_choices, decision.steps, decision.reason


@pytest.mark.parametrize(
    ("budget", "choices", "steps", "reason"),
    [
        (BudgetRequest(), (1, 2), 2, "default"),
        (BudgetRequest(min_steps=2), (2,), 2, "default"),
        (BudgetRequest(min_steps=3), (4,), 4, "default"),
        (BudgetRequest(max_steps=1), (1,), 1, "default"),
        (BudgetRequest(max_steps=100), (1, 2), 2, "default"),
        (BudgetRequest(deadline_ms=50), (1, 2, 4), 4, "deadline"),
        (BudgetRequest(deadline_ms=50, min_steps=2, max_steps=3), (2,), 2, "deadline"),
        (BudgetRequest(deadline_ms=50, steps=2), (), 2, "exact"),
        (BudgetRequest(deadline_ms=50, effort="max"), (), 4, "effort"),
    ],
)
def test_where_the_server_chooses_it_is_told_from_what(
    budget: BudgetRequest, choices: tuple[int, ...], steps: int, reason: str
) -> None:
    assert chosen(budget) == (choices, steps, reason)


def test_a_choice_below_the_best_says_why() -> None:
    usual = decide(BudgetRequest(), MANIFEST)
    assert usual.served_at(4) is usual
    assert (usual.served_at(2).steps, usual.served_at(2).reason) == (2, "load")
    pressed = decide(BudgetRequest(deadline_ms=50), MANIFEST)
    assert (pressed.served_at(1).steps, pressed.served_at(1).reason) == (1, "deadline")


@pytest.mark.parametrize(
    ("budget", "param"),
    [
        (BudgetRequest(min_steps=2, max_steps=1), "min_steps"),
        (BudgetRequest(min_steps=3, max_steps=3), "min_steps"),
        (BudgetRequest(min_steps=5), "min_steps"),
        (BudgetRequest(steps=1, min_steps=2), "min_steps"),
        (BudgetRequest(steps=4, max_steps=2), "max_steps"),
        (BudgetRequest(effort="low", min_steps=2), "min_steps"),
        (BudgetRequest(max_disagreement=0.05, max_steps=2), "max_steps"),
        (BudgetRequest(max_disagreement=0.05, min_steps=2), "min_steps"),
        (BudgetRequest(max_disagreement=0.05, min_steps=9), "min_steps"),
    ],
)
def test_limits_that_contradict_are_refused_by_name(budget: BudgetRequest, param: str) -> None:
    with pytest.raises(ImpossibleBudget) as error:
        decide(budget, CALIBRATED)
    assert error.value.param == param


def test_disagreement_with_all_steps_asked_for_stops_nowhere() -> None:
    decision = decide(BudgetRequest(max_disagreement=0.05, min_steps=4, max_steps=4), CALIBRATED)
    assert (decision.steps, decision.reason, decision.threshold) == (4, "disagreement", None)
