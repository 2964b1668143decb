"""Objectives: what each pass is weighed with, what is drawn to what, and what is left alone."""

from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fixtures.tiny_runs import tiny_label_run
from train.checkpoint import load_run, save_weights
from train.data import open_dataset
from train.data.batch import IGNORED, Sizes
from train.data.labelled import LabelledDataset
from train.distil import Waypoints, blocks_of, distance, kept_logits
from train.model import OTTransformer, Output, Stepped, build_model
from train.objective import (
    JumpPoint,
    Objective,
    Pass,
    divergence,
    pass_weights,
    penalty,
    straightness_gap,
    task_loss,
)
from train.ode import METHODS, Trajectory
from train.recipe import Recipe, load_recipe
from train.schedule import Turn

SANDWICH = ["steps.schedule=sandwich", "steps.distil=1.0", "steps.jump=0.3", "optim.transport=0.5"]
TOKENS = torch.arange(1, 13).view(2, 6)
TARGETS = torch.tensor([0, 1])


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe("parity", ["model.width=16", *overrides])


def model_of(recipe: Recipe, seed: int = 0) -> OTTransformer:
    torch.manual_seed(seed)
    model = build_model(recipe.model, Sizes(vocabulary=20, classes=2))
    assert isinstance(model, OTTransformer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # far enough from linear that counts differ
    return model


def passes_of(recipe: Recipe, turn: Turn, original: Stepped | None = None) -> list[Pass]:
    made = Objective(recipe, model_of(recipe), nullcontext, original)
    return list(made.passes((TOKENS,), TARGETS, turn))


def answer(recipe: Recipe, steps: int, seed: int = 0) -> Output:
    output: Output = model_of(recipe, seed)(TOKENS, steps=steps)
    return output


def test_a_plain_pass_is_task_and_transport_cost() -> None:
    recipe = recipe_of("optim.transport=0.5")
    (one,) = passes_of(recipe, Turn((3,)))
    output = answer(recipe, 3)
    torch.testing.assert_close(one.loss, task_loss(output.logits, TARGETS) + 0.5 * output.cost)
    assert one.evaluations == 3


def test_a_sandwich_adds_up_to_one_task() -> None:
    assert sum(pass_weights(3, 0.4)) == pytest.approx(1)
    recipe = recipe_of(*SANDWICH, "steps.full_probability=0.4")
    made = passes_of(recipe, Turn((4, 1, 2), distilling=True))
    full, one, two = (answer(recipe, steps) for steps in (4, 1, 2))
    task = [task_loss(output.logits, TARGETS) for output in (full, one, two)]
    kl = [divergence(output.logits, full.logits, TARGETS) for output in (one, two)]
    expected = [
        0.4 * task[0] + 0.5 * full.cost,
        0.3 * (task[1] + kl[0]) / 2,
        0.3 * (task[2] + kl[1]) / 2,
    ]
    for found, loss in zip(made, expected, strict=True):
        torch.testing.assert_close(found.loss, loss)
    assert [one.evaluations for one in made] == [4, 1, 2]
    before = passes_of(recipe, Turn((4, 1, 2)))
    torch.testing.assert_close(before[1].loss, 0.3 * task[1])


def test_the_full_answer_is_not_drawn_to_the_shorter_ones() -> None:
    """With no weight of its own and no cost, the full pass leaves no gradient at all."""
    recipe = recipe_of(*SANDWICH, "steps.full_probability=0.0", "optim.transport=0")
    model = model_of(recipe)
    made = Objective(recipe, model, nullcontext).passes(
        (TOKENS,), TARGETS, Turn((4, 1), distilling=True)
    )
    next(made).loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    next(made).loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_jump_is_the_read_out_of_a_straight_line_from_its_evaluation(k: int) -> None:
    recipe = recipe_of(*SANDWICH, "model.T=2.0")
    (jumped,) = passes_of(recipe, Turn((4,), jump=k))
    (plain,) = passes_of(recipe, Turn((4,)))
    model = model_of(recipe)
    x, context, _ = model.embed(TOKENS)
    for _ in range(k):
        x = x + 0.5 * model.velocity(x, *context)
    line = x + (2.0 - 0.5 * k) * model.velocity(x, *context)
    kl = divergence(model.head(line, *context), model(TOKENS, steps=4).logits, TARGETS)
    torch.testing.assert_close(jumped.loss - plain.loss, 0.3 * kl)
    assert jumped.evaluations == 4  # the jump takes what was evaluated anyway


def test_a_jump_from_the_only_evaluation_of_one_step_is_its_answer() -> None:
    recipe = recipe_of()
    model, point = model_of(recipe), JumpPoint(0, 1.0)
    output = model(TOKENS, steps=1, observe=point)
    assert point.end is not None
    torch.testing.assert_close(model.head(point.end, *output.context), output.logits)


@pytest.mark.parametrize("depth", ["ode", "discrete"])
def test_states_are_told_by_the_share_of_the_depth_that_lies_behind(depth: str) -> None:
    model = model_of(recipe_of(f"model.depth={depth}", "model.layers=2")).eval()
    with torch.no_grad(), Waypoints(model) as points:
        output = model(TOKENS, steps=2, observe=points)
        path = points.path(output)
        start = output.trajectories[0].start
        (mask,) = output.context
        half = start + 0.5 * model.velocity(start, mask)
        if depth == "discrete":
            half = next(iter(blocks_of(model)))(start, mask)
    assert list(path) == [Fraction(1, 2), 1]
    torch.testing.assert_close(path[Fraction(1, 2)], half)
    if depth == "ode":
        torch.testing.assert_close(path[Fraction(1)], output.trajectories[0].end)


def test_states_are_compared_as_shares_of_the_size_of_the_teachers() -> None:
    aim = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    mine = {Fraction(1, 2): 1.5 * aim, Fraction(1, 3): aim, Fraction(1): 3 * aim}
    found = distance(mine, {Fraction(1, 2): aim, Fraction(1): 100 * aim}, None)
    assert float(found) == pytest.approx((0.5**2 + 0.97**2) / 2)


def test_a_teacher_answers_with_all_its_steps_and_anew_once_it_was_trained_further(
    tmp_path: Path,
) -> None:
    run = tiny_label_run(tmp_path, "optim.iterations=2", "run.evaluate_every=2", "data.rows=40")
    model, recipe, tokenizer, _ = load_run(run)
    dataset = open_dataset(recipe, tokenizer)
    assert isinstance(dataset, LabelledDataset)
    ((at, batch),) = dataset.training_rows(64)

    def answers() -> Tensor:
        logits = torch.zeros(len(at), 2)
        with torch.no_grad():
            logits[at] = model(*batch.inputs, steps=4, method="euler").logits
        return logits

    before = answers()
    torch.testing.assert_close(kept_logits(run, dataset, quiet=True), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    save_weights(run, model, 3)
    after = answers()
    torch.testing.assert_close(kept_logits(run, dataset, quiet=True), after)
    assert not torch.allclose(before, after)


def test_a_teacher_teaches_every_pass_and_learns_nothing() -> None:
    recipe = recipe_of(*SANDWICH, "steps.full=4", "optim.transport=0")
    teacher = model_of(recipe, seed=1).requires_grad_(False)
    made = passes_of(recipe, Turn((4, 1), distilling=True), teacher)
    aim = answer(recipe, 4, seed=1).logits
    for found, steps in zip(made, (4, 1), strict=True):
        logits = answer(recipe, steps).logits
        expected = (task_loss(logits, TARGETS) + divergence(logits, aim, TARGETS)) / 2
        torch.testing.assert_close(found.loss, 0.5 * expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_gap_is_what_the_path_costs_beyond_the_straight_one(method: str) -> None:
    recipe = recipe_of("model.T=2.0")
    model = model_of(recipe)
    x0 = model.embed(TOKENS).state
    output = model(TOKENS, steps=3, method=method)
    end = output.trajectories[-1].end
    least = (end - x0).square().mean() / 2.0
    torch.testing.assert_close(straightness_gap(output), output.cost - least)
    one = model(TOKENS, steps=1, method="euler")
    torch.testing.assert_close(one.cost - straightness_gap(one), one.cost)  # one step is straight


def test_the_curvature_penalty_weighs_the_gap() -> None:
    recipe = recipe_of("optim.penalty=curvature", "optim.transport=0.5")
    (one,) = passes_of(recipe, Turn((3,)))
    output = answer(recipe, 3)
    expected = task_loss(output.logits, TARGETS) + 0.5 * straightness_gap(output)
    torch.testing.assert_close(one.loss, expected)


@pytest.mark.parametrize("kind", ["transport", "curvature"])
def test_no_penalty_moves_a_discrete_model(kind: str) -> None:
    found = []
    for weight in (0.0, 5.0):
        recipe = recipe_of(
            "model.depth=discrete", f"optim.penalty={kind}", f"optim.transport={weight}"
        )
        objective = Objective(recipe, model_of(recipe), nullcontext)
        (one,) = objective.passes((TOKENS,), TARGETS, Turn((1,)))
        one.loss.backward()
        found.append([p.grad for p in objective.model.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_divergence_is_kl_over_what_counts() -> None:
    torch.manual_seed(0)
    mine, aim = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    targets = torch.tensor([[1, 2, IGNORED], [0, IGNORED, IGNORED]])

    def kl(row: int, place: int) -> Tensor:
        p, q = aim[row, place].softmax(0), mine[row, place].softmax(0)
        return (p * (p / q).log()).sum()

    expected = (kl(0, 0) + kl(0, 1) + kl(1, 0)) / 3
    torch.testing.assert_close(divergence(mine, aim, targets), expected)
    assert float(divergence(aim, aim, targets)) == pytest.approx(0, abs=1e-6)


def test_classes_weigh_what_a_teacher_says_too() -> None:
    recipe = recipe_of("optim.smoothing=0.0", 'teacher.run="x"')
    targets = torch.tensor([0] * 9 + [1])
    weights = torch.tensor([10 / 18, 10 / 2])  # balanced
    taught = 8.0 * torch.nn.functional.one_hot(targets, 2) - 4.0
    logits = torch.zeros(10, 2, requires_grad=True)
    made = Objective(recipe, model_of(recipe), nullcontext, class_weights=weights)
    made._task(logits, None, targets, Turn((1,)), taught).backward()
    assert logits.grad is not None
    pull = logits.grad.abs().sum(1)
    torch.testing.assert_close(pull[targets == 0].sum(), pull[targets == 1].sum())


def test_a_chain_and_its_adaptive_solution_count_their_evaluations() -> None:
    small = ["model.block=timed", "model.depth=chain", "model.layers=3", "model.heads=4"]
    recipe = recipe_of(*small, "steps.solver=adaptive", "steps.tolerance=1e-3")
    model = model_of(recipe)
    model.tolerance = recipe.steps.tolerance
    made = list(Objective(recipe, model, nullcontext).passes((TOKENS,), TARGETS, Turn((4,))))
    assert made[0].evaluations > 3 * 6  # of three velocities, a step of Dormand and Prince has six
    made[0].loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.velocity.parameters())
    model.tolerance = None
    assert model(TOKENS, steps=4, method="heun").evaluations == 3 * 4 * 2


def test_smoothing_draws_no_row_towards_a_class_of_more_weight() -> None:
    """At 99 rows to 1 the best answer to a common row is the common class all the same."""
    weights = torch.tensor([100 / 198, 100 / 2])
    rows = torch.arange(2).repeat_interleave(torch.tensor([99, 1]))
    logits = torch.zeros(2, 2, requires_grad=True)  # one answer for each class of row
    optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = task_loss(logits[rows], rows, 0.05, weights)
        found.backward()
        return found

    optimizer.step(loss)
    shares = logits.detach().softmax(-1)
    torch.testing.assert_close(
        shares, torch.tensor([[0.975, 0.025], [0.025, 0.975]]), atol=1e-3, rtol=0
    )
    once = task_loss(logits.detach()[rows], rows, 0.05, torch.ones(2))
    torch.testing.assert_close(once, task_loss(logits.detach()[rows], rows, 0.05))


def test_the_speed_of_two_trajectories_is_their_cost_a_unit_of_all_their_time() -> None:
    x = torch.zeros(1, 2, 3)
    trajectories = (Trajectory(x, x, None, 2.0), Trajectory(x, x, None, 1.0))
    assert float(penalty(Output(x, torch.tensor(6.0), 2, trajectories), "speed")) == 2


def test_a_teacher_weighs_its_share_and_its_temperature_keeps_the_size_of_gradients() -> None:
    settings = ["teacher.weight=0.25", "teacher.temperature=2", "optim.smoothing=0"]
    recipe = recipe_of(*settings, "optim.transport=0")
    model, taught = model_of(recipe), torch.tensor([[3.0, -1.0], [0.5, 2.0]])
    objective = Objective(recipe, model, nullcontext)
    (one,) = objective.passes((TOKENS,), TARGETS, Turn((4,)), taught)
    logits = model(TOKENS, steps=4).logits
    apart = 2**2 * divergence(logits / 2, taught / 2, TARGETS)
    torch.testing.assert_close(one.loss, 0.75 * task_loss(logits, TARGETS) + 0.25 * apart)
