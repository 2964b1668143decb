"""Step counts of iterations: what is drawn, what it costs, and how far the training has come."""

import dataclasses
from collections import Counter
from typing import Any

import pytest

from train.recipe import RecipeError, StepsConfig, load_recipe
from train.schedule import (
    JUMPS,
    Turn,
    expected_steps,
    growing_iterations,
    ladder_of,
    progress,
    shortest_of,
    steps_of,
    turn_for,
)

ANY = StepsConfig(full=8, short=(1, 2, 4), grow=0.5)
SANDWICH = dataclasses.replace(ANY, schedule="sandwich", distil=1.0, jump=0.3, distil_from=0.7)
COUNT = 4000


def turns(config: StepsConfig, seed: int = 0) -> list[Turn]:
    return [turn_for(i, COUNT, config, seed) for i in range(COUNT)]


def test_growing_comes_first_then_every_count() -> None:
    grown = growing_iterations(COUNT, ANY)
    drawn = [turn.counts for turn in turns(ANY)]
    assert set(drawn[:grown]) == {(1,)}
    assert set(drawn[grown:]) == {(1,), (2,), (4,), (8,)}
    assert drawn[grown:].count((8,)) / (COUNT - grown) == pytest.approx(0.5, abs=0.06)
    assert expected_steps(ANY) == pytest.approx(0.5 * 8 + 0.5 * 7 / 3)


def test_a_fixed_schedule_neither_grows_nor_draws() -> None:
    fixed = dataclasses.replace(ANY, schedule="fixed")
    assert set(turns(fixed)) == {Turn((8,))}
    assert progress(1000, COUNT, fixed) == 0.25


def test_a_sandwich_is_full_smallest_and_one_between() -> None:
    grown = growing_iterations(COUNT, SANDWICH)
    later = turns(SANDWICH)[grown:]
    shares = Counter(turn.counts for turn in later)
    assert set(shares) == {(8, 1, 2), (8, 1, 4)}
    assert shares[8, 1, 2] / len(later) == pytest.approx(0.5, abs=0.06)
    assert expected_steps(SANDWICH) == 8 + 1 + 3
    few = dataclasses.replace(SANDWICH, short=(1, 8))
    assert turn_for(COUNT - 1, COUNT, few, 0).counts == (8, 1)
    assert expected_steps(few) == 9


def test_a_tail_of_larger_counts_costs_more_than_the_full_one() -> None:
    tail = StepsConfig(full=8, short=(), schedule="tail", dial="time", grow=0.0)
    spent = [turn.counts[0] for turn in turns(tail)]
    assert max(spent) == 32 and min(spent) < 4
    assert sum(spent) / COUNT == pytest.approx(expected_steps(tail), rel=0.02)


@pytest.mark.parametrize("config", [ANY, SANDWICH])
def test_the_clock_is_the_cost(config: StepsConfig) -> None:
    """The share that `progress` tells is that of the velocity evaluations really spent."""
    spent = [sum(turn.counts) for turn in turns(config)]
    grown = growing_iterations(COUNT, config)
    assert sum(spent[:grown]) / sum(spent) == pytest.approx(config.grow, abs=0.01)
    assert progress(grown, COUNT, config) == pytest.approx(config.grow)
    for iteration in (grown // 2, (grown + COUNT) // 2, COUNT):
        share = sum(spent[:iteration]) / sum(spent)
        assert progress(iteration, COUNT, config) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("schedule", ["any", "sandwich"])
def test_distilling_and_jumps_begin_when_they_are_told_to(schedule: str) -> None:
    distil = 1.0 if schedule == "sandwich" else 0.0
    changes: dict[str, Any] = {"schedule": schedule, "distil": distil}
    config = dataclasses.replace(SANDWICH, **changes)
    for iteration, turn in enumerate(turns(config)):
        begun = progress(iteration, COUNT, config) >= config.distil_from
        assert turn.distilling == (begun and distil > 0)
        assert (turn.jump is not None) == (begun and turn.counts[0] == config.full)
    assert {turn.jump for turn in turns(config)} == {None, *range(JUMPS)}
    two = dataclasses.replace(config, full=2, short=(1,))
    assert {turn.jump for turn in turns(two)} == {None, 0}  # a jump from the last is the step


@pytest.mark.parametrize(
    ("changes", "shortest"),
    [
        ({"grow": 0.5, "short": (2, 4)}, 1),
        ({"grow": 0.0, "short": (2, 4)}, 2),
        ({"schedule": "fixed", "short": (1, 2)}, 8),
        ({"schedule": "fixed", "dial": "time", "exits": (4,)}, 4),
        ({"schedule": "tail", "dial": "time", "short": (2,), "grow": 0.0}, 1),
    ],
)
def test_the_shortest_count_is_of_those_that_are_trained(
    changes: dict[str, Any], shortest: int
) -> None:
    assert shortest_of(StepsConfig(full=8, **changes)) == shortest


def test_turns_are_a_function_of_seed_and_iteration() -> None:
    assert turns(SANDWICH) == turns(SANDWICH)
    assert turns(SANDWICH) != turns(SANDWICH, seed=1)


def test_one_depth_and_a_solver_of_its_own_leave_nothing_to_draw() -> None:
    discrete = load_recipe("parity", ["model.depth=discrete", "steps.method=heun"])
    assert turn_for(0, 10, steps_of(discrete), 0) == Turn((1,))
    assert progress(5, 10, steps_of(discrete)) == 0.5
    stages = ["steps.grow=0", "steps.short=[1, 2]", "steps.stages=[0.5, 0.3, 0.2]"]
    staged = load_recipe("parity", ["model.depth=discrete", *stages])
    assert [turn_for(i, 10, steps_of(staged), 0) for i in range(10)] == [Turn((1,))] * 10
    adaptive = load_recipe("parity", ["steps.solver=adaptive"])
    assert progress(5, 10, steps_of(adaptive)) == 0.5
    assert steps_of(load_recipe("parity")) == load_recipe("parity").steps


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["steps.jump=0.3", "model.depth=discrete"], "steps.jump needs model.depth"),
        (["steps.solver=adaptive", "model.depth=discrete"], "steps.solver"),
        (["steps.solver=adaptive", "steps.checkpoint=true"], "steps.checkpoint and"),
        (["steps.solver=adaptive", "model.dropout=0.1"], "needs model.dropout 0"),
        (["steps.solver=adaptive", "optim.precision=bf16"], 'optim.precision "fp32"'),
        (["model.conditioned=true", "model.depth=discrete"], "model.conditioned and timed need"),
        (["model.conditioned=true", "model.timed=true"], "must not both be on"),
        (
            ["model.depth=chain", "model.block=evolved"],
            'model.depth must be "discrete" for model.block "evolved"',
        ),
        (
            ["model.depth=chain", "model.block=runge-kutta"],
            'model.depth must be "discrete" for model.block "runge-kutta"',
        ),
        (["model.attention_dropout=0.1", "steps.solver=adaptive"], "needs model.dropout 0"),
        (["model.depth=chain", "model.final_norm=inside"], 'final_norm "inside" needs'),
        (
            ["model.block=evolved", "model.depth=discrete", "model.final_norm=inside"],
            'final_norm "inside" needs',
        ),
        (["model.reach=4", "model.block=timed", "model.depth=chain"], "model.reach must not"),
        (["model.function=attention"], 'model.function needs model.block "runge-kutta"'),
        (["model.block=timed", "model.depth=chain", "model.hidden=0"], "nor 0 for timed"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load_recipe("parity", overrides)


@pytest.mark.parametrize(
    ("full", "counts"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])]
)
def test_a_ladder_ends_at_the_full_count(full: int, counts: list[int]) -> None:
    recipe = load_recipe("parity", [f"steps.full={full}", "steps.short=[1]"])
    assert ladder_of(recipe) == counts
