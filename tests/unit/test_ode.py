"""Integration: declared order, transport cost, gradients, and what a velocity may be."""

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from train.data.batch import Sizes
from train.model import Stepped, build_model
from train.ode import METHODS, integrate
from train.recipe import ModelConfig


def spin(x: Tensor) -> Tensor:
    """x' = A x with a rotation, which has an exact solution."""
    return torch.stack([-x[..., 1], x[..., 0]], dim=-1)


def exact(x0: Tensor, T: float) -> Tensor:
    c, s = math.cos(T), math.sin(T)
    return x0 @ torch.tensor([[c, s], [-s, c]], dtype=x0.dtype)


class Growing:
    """x' = x cos(t), whose solution is x0 exp(sin t)."""

    timed = True

    def __call__(self, x: Tensor, t: float, h: float) -> Tensor:
        return x * math.cos(t)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("timed", [False, True], ids=["autonomous", "timed"])
def test_the_measured_order_is_the_declared_one(name: str, timed: bool) -> None:
    x0 = torch.tensor([[[1.0, 0.5]]], dtype=torch.float64)
    velocity = Growing() if timed else spin
    solution = x0 * math.exp(math.sin(1.5)) if timed else exact(x0, 1.5)
    errors = []
    counts = [16, 32, 64]
    for steps in counts:
        end = integrate(velocity, x0, name, steps, T=1.5).state
        errors.append(float((end - solution).norm()))
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    # ab2 starts with one Euler step, whose error is of the same order as its own.
    assert slopes[-1] == pytest.approx(METHODS[name].order, abs=0.15)


@pytest.mark.parametrize("name", METHODS)
def test_stage_weights_sum_to_one(name: str) -> None:
    method = METHODS[name]
    assert sum(method.b) == pytest.approx(1)
    assert [sum(row) for row in method.a] == pytest.approx(list(method.c))


def test_one_euler_step_is_x_plus_f_of_x_exactly() -> None:
    f = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    x0 = torch.randn(2, 3, 6)
    assert torch.equal(integrate(f, x0, "euler", 1).state, x0 + f(x0))


def test_any_module_of_the_right_shape_is_a_velocity() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    path = integrate(encoder, torch.randn(2, 5, 8), "heun", 3)
    assert path.state.shape == (2, 5, 8)
    assert float(path.cost.detach()) > 0


def test_a_timed_velocity_gets_times_as_fractions_of_the_interval() -> None:
    seen: list[tuple[float, float]] = []

    class Timed:
        timed = True

        def __call__(self, x: Tensor, t: float, h: float) -> Tensor:
            seen.append((t, h))
            return torch.zeros_like(x)

    integrate(Timed(), torch.zeros(1, 1, 1), "midpoint", 3, T=3.0)
    assert seen == [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (1.5, 1.0), (2.0, 1.0), (2.5, 1.0)]


def test_the_cost_of_a_constant_velocity_is_t_times_its_mean_square() -> None:
    v = torch.randn(2, 3, 4)
    for name in METHODS:
        cost = integrate(lambda x: v, torch.zeros(2, 3, 4), name, 5, T=2.0).cost
        assert float(cost) == pytest.approx(2.0 * float(v.square().mean()), rel=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_no_path_costs_less_than_the_straight_one(name: str, steps: int) -> None:
    class Turning(torch.nn.Module):
        timed = True

        def forward(self, x: Tensor, t: float, h: float) -> Tensor:
            return torch.tensor([[[t, 1 - 2 * t, 0.5]]])

    x0 = torch.zeros(1, 1, 3)
    end, cost, _ = integrate(Turning(), x0, name, steps, T=2.0)
    assert float(cost) >= float((end - x0).square().mean() / 2.0) - 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_evaluations_weigh_as_much_in_the_cost_as_in_the_step(name: str) -> None:
    """So the cost of a velocity is how far its square leads."""

    class Rising:
        timed = True

        def __init__(self, power: int) -> None:
            self.power = power

        def __call__(self, x: Tensor, t: float, h: float) -> Tensor:
            return torch.full((1, 1, 1), (t - 0.3) ** self.power)

    once, squared = (integrate(Rising(n), torch.zeros(1, 1, 1), name, 4, T=2.0) for n in (1, 2))
    assert float(once.cost) == pytest.approx(float(squared.state), rel=1e-5)


def test_masked_positions_do_not_count_in_the_cost() -> None:
    v = torch.ones(1, 3, 4)
    v[:, 2] = 100
    mask = torch.tensor([[True, True, False]])
    assert float(integrate(lambda x: v, v, "euler", 2, mask=mask).cost) == pytest.approx(1.0)


def small_model() -> Stepped:
    torch.manual_seed(0)
    config = ModelConfig("decoder", width=8, heads=2, hidden=12, window=6, layers=1)
    return build_model(config, Sizes(vocabulary=11)).double()


TOKENS = torch.arange(12).view(2, 6) % 11


def loss_of(model: Stepped, method: str) -> Tensor:
    output = model(TOKENS, steps=3, method=method)
    loss: Tensor = output.logits.square().mean() + 0.3 * output.cost
    return loss


def gradients(model: Stepped, method: str) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, method).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])
def test_gradients_match_finite_differences(method: str, checkpoint: bool) -> None:
    """Of the loss with the transport cost, along random directions in the space of all weights."""
    model = small_model()
    model.checkpoint = checkpoint
    found = gradients(model, method)
    for seed in range(3):
        torch.manual_seed(seed)
        direction = [torch.randn_like(p) for p in model.parameters()]
        slope = sum(float((g * d).sum()) for g, d in zip(found, direction, strict=True))
        ahead, behind = (moved_loss(model, method, direction, step) for step in (1e-6, -1e-6))
        assert (ahead - behind) / 2e-6 == pytest.approx(slope, rel=1e-6)


def moved_loss(model: Stepped, method: str, direction: list[Tensor], step: float) -> float:
    """The loss at weights a step further along a direction."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, d in zip(moved.parameters(), direction, strict=True):
            parameter.add_(d, alpha=step)
        return float(loss_of(moved, method))


@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_changes_no_gradient(method: str) -> None:
    model = small_model()
    plain = gradients(model, method)
    model.checkpoint = True
    for one, other in zip(plain, gradients(model, method), strict=True):
        assert torch.equal(one, other)


def bytes_kept(call: Callable[[], object]) -> int:
    """What a call allocates and still holds when it has returned, as PyTorch's profiler counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        result = call()
    assert made.profiler is not None and result is not None
    events = made.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_checkpointing_keeps_a_state_a_step_and_little_else() -> None:
    model = small_model().float()
    tokens = TOKENS.repeat(8, 1)
    state_bytes = tokens.numel() * 8 * 4

    def kept(steps: int, checkpoint: bool) -> int:
        model.checkpoint = checkpoint
        return bytes_kept(lambda: model(tokens, steps=steps))

    with_it, without = (
        (kept(12, checkpoint) - kept(2, checkpoint)) / (10 * state_bytes)
        for checkpoint in (True, False)
    )
    random_state = torch.get_rng_state().numel() / state_bytes  # of dropout, for each step
    assert with_it - random_state == pytest.approx(1, abs=0.2)
    assert without > 10


def test_bad_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        integrate(spin, torch.zeros(1, 1, 2), "euler", 0)
    with pytest.raises(ValueError, match="choose one of euler, ab2"):
        integrate(spin, torch.zeros(1, 1, 2), "leapfrog", 1)
