"""Timed velocities, and their adaptive integration."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.papers.queue import PLAN, read_plan
from tests.traced import check_trace
from train.blocks import Block, BlockVelocity, TimedAttention, TimedLinear, TimedVelocity
from train.data.batch import Sizes
from train.interrupt import SolverError
from train.loop import train
from train.metrics import METRICS, read_metrics
from train.model import OTTransformer, build_model, count_parameters
from train.ode import Bound, Embedded, adaptive, integrate, solve
from train.recipe import load_recipe

WIDTH, HEADS = 8, 4


def velocity(inner_skip: bool = True) -> TimedVelocity:
    torch.manual_seed(0)
    return TimedVelocity(WIDTH, HEADS, WIDTH, inner_skip)


class Growth(nn.Module):
    """x' = x cos(t), whose solution is x0 exp(sin t)."""

    timed = True

    def forward(self, x: Tensor, t: float, h: float) -> Tensor:
        return x * torch.as_tensor(t).cos()


def test_a_timed_linear_layer_is_an_affine_one_whose_bias_moves() -> None:
    layer = TimedLinear(3, 5)
    x = torch.randn(2, 4, 3)
    for t in (0.0, 0.7, torch.tensor(0.7)):
        expected = x @ layer.affine.weight.T + layer.affine.bias + layer.drift * t
        torch.testing.assert_close(layer(x, t), expected)


@pytest.mark.parametrize("inner_skip", [True, False])
def test_a_velocity_is_the_feed_forward_of_attention_with_or_without_a_skip(
    inner_skip: bool,
) -> None:
    made = velocity(inner_skip)
    x = torch.randn(2, 5, WIDTH)
    y = made.attention(x) + (x if inner_skip else 0)
    expected = made.down(torch.relu(made.up(y, 0.3)), 0.3)
    torch.testing.assert_close(made(x, 0.3, 0.1), expected)
    assert not torch.allclose(made(x, 0.6, 0.1), expected)
    assert torch.equal(made(x, 0.3, 0.5), made(x, 0.3, 0.1))


@pytest.mark.parametrize("inner_skip", [True, False])
def test_all_affine_layers_of_timed_attention_know_the_time(inner_skip: bool) -> None:
    torch.manual_seed(0)
    made = TimedVelocity(WIDTH, HEADS, WIDTH, inner_skip, timed_attention=True)
    x, t = torch.randn(2, 5, WIDTH), 0.3
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    attention = made.attention
    assert isinstance(attention, TimedAttention)
    into, out = attention.qkv, attention.out
    qkv = x @ into.affine.weight.T + into.affine.bias + into.drift * t
    q, k, v = (part.view(2, 5, HEADS, -1).transpose(1, 2) for part in qkv.chunk(3, -1))
    scores = q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5
    shares = scores.masked_fill(~mask[:, None, None, :], -torch.inf).softmax(-1)
    mixed = (shares @ v).transpose(1, 2).flatten(2)
    y: Tensor = mixed @ out.affine.weight.T + out.affine.bias + out.drift * t
    expected = made.down(torch.relu(made.up(y + x if inner_skip else y, t)), t)
    torch.testing.assert_close(made(x, mask, t, 0.1), expected)
    for layer in (into, out):
        moved = made(x, mask, t, 0.1)
        with torch.no_grad():
            layer.drift.add_(1)
        assert not torch.allclose(made(x, mask, t, 0.1), moved)


def test_the_vanilla_transformer_beside_an_n_ode_misses_the_time_and_nothing_else() -> None:
    ours = load_recipe("n-ode-parity").model
    jobs = [job for job in read_plan(PLAN) if job.group == "n-ode-parity-vanilla"]
    vanilla = jobs[0].described().model
    sizes = Sizes(vocabulary=5, classes=2)
    timed, plain = (build_model(config, sizes) for config in (ours, vanilla))
    moving = ours.layers * (ours.hidden + ours.width)  # c of each timed layer
    assert count_parameters(timed) == count_parameters(plain) + moving
    assert isinstance(plain, OTTransformer) and isinstance(plain.velocity, BlockVelocity)
    for block in plain.velocity.blocks:
        assert isinstance(block, Block) and block.feedforward is not None
        x = torch.randn(2, 5, ours.width)
        y = x + block.attention(x)
        inner = torch.relu(block.feedforward.up(y))
        torch.testing.assert_close(block(x), y + block.feedforward.down(inner))


def test_a_chain_integrates_its_velocities_one_after_another_from_time_zero() -> None:
    chain = nn.ModuleList([velocity(), velocity(False)])
    x = torch.randn(2, 5, WIDTH)
    path = solve(chain, Embedded(x), "chain", 3, "heun")
    first = integrate(chain[0], x, "heun", 3)
    second = integrate(chain[1], first.state, "heun", 3)
    torch.testing.assert_close(path.state, second.state)
    torch.testing.assert_close(path.cost, first.cost + second.cost)


def test_the_adaptive_solution_is_the_exact_one_and_that_of_many_small_steps() -> None:
    x = torch.randn(2, 5, WIDTH)
    path = adaptive(Growth(), x, T=2.0)
    torch.testing.assert_close(path.state, x * math.exp(math.sin(2.0)), rtol=1e-4, atol=1e-4)

    made, mask = velocity(), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    # The velocity has kinks, which an error estimate sees only once steps are small.
    path = adaptive(made, x, (mask,), rtol=1e-7, atol=1e-7, present=mask)
    steps = integrate(Bound(made, (mask,)), x, "rk4", 128, mask=mask)
    torch.testing.assert_close(path.state[mask], steps.state[mask], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(path.cost, steps.cost, rtol=2e-4, atol=2e-4)


def test_evaluations_are_counted_and_grow_with_the_accuracy() -> None:
    calls = 0

    class Counting(Growth):
        def forward(self, x: Tensor, t: float, h: float) -> Tensor:
            nonlocal calls
            calls += 1
            assert 0 <= float(t) <= 3.0
            return super().forward(x, t, h)

    x = torch.randn(1, 2, 3)
    rough = adaptive(Counting(), x, T=3.0, rtol=1e-2, atol=1e-2)
    assert rough.evaluations == calls
    fine = adaptive(Counting(), x, T=3.0, rtol=1e-6, atol=1e-6)
    assert rough.evaluations + fine.evaluations == calls
    assert fine.evaluations > 1.5 * rough.evaluations


def test_padding_neither_moves_nor_steers_nor_counts() -> None:
    made, x = velocity(), torch.randn(1, 6, WIDTH)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    padded = adaptive(made, x, (mask,), present=mask)
    alone = adaptive(made, x[:, :4])
    assert padded.evaluations == alone.evaluations
    torch.testing.assert_close(padded.state[:, :4], alone.state)
    torch.testing.assert_close(padded.cost, alone.cost)
    assert torch.equal(padded.state[:, 4:], x[:, 4:])


def test_gradients_go_back_through_the_solver_to_state_and_cost() -> None:
    class Scaled(Growth):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.8))

        def forward(self, x: Tensor, t: float, h: float) -> Tensor:
            return self.scale * super().forward(x, t, h)

    made, x = Scaled(), torch.randn(1, 3, WIDTH)
    path = adaptive(made, x, T=2.0)
    (of_state,) = torch.autograd.grad(path.state.sum(), made.scale, retain_graph=True)
    exact = x.sum() * math.sin(2.0) * math.exp(0.8 * math.sin(2.0))
    torch.testing.assert_close(of_state, exact, rtol=1e-3, atol=1e-3)
    (of_cost,) = torch.autograd.grad(path.cost, made.scale)
    (expected,) = torch.autograd.grad(integrate(made, x, "rk4", 64, T=2.0).cost, made.scale)
    torch.testing.assert_close(of_cost, expected, rtol=1e-3, atol=1e-3)


def test_a_velocity_that_explodes_and_a_missing_solver_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Explosion(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1e3 * x**3

    with pytest.raises(SolverError, match=r"gave up after \d+ evaluations .*lower optim.lr"):
        adaptive(Explosion(), torch.ones(1, 1, 2))
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(SolverError, match="needs torchdiffeq"):
        adaptive(Growth(), torch.ones(1, 1, 2))


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.velocity = velocity()

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        x, mask, t = inputs
        return (self.velocity(x, mask, t, 0.1),)


@pytest.mark.long
def test_a_velocity_exports_with_time_as_an_input() -> None:
    mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    traced_with = torch.randn(2, 5, WIDTH), mask, torch.tensor(0.5)
    run_with = torch.randn(3, 2, WIDTH), torch.ones(3, 2).bool(), torch.tensor(0.25)
    check_trace(Traced(), traced_with, [[0, 1], [0, 1], []], run_with)


def test_a_training_solves_to_the_tolerance_of_its_recipe(tmp_path: Path) -> None:
    """A finer one costs more evaluations."""
    cost: list[int] = []
    for tolerance in ("1e-1", "1e-6"):
        small = ["optim.iterations=2", "optim.batch=4", "run.evaluate_every=2"]
        recipe = load_recipe("n-ode-parity", [*small, f"steps.tolerance={tolerance}"])
        model = train(recipe, tmp_path / tolerance, quiet=True)
        assert model.tolerance == float(tolerance)
        cost.append(read_metrics(tmp_path / tolerance / METRICS)[-1]["evaluations"])
    assert cost[0] < cost[1]
