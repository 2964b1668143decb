"""Integration: declared order, transport cost, gradients, and what a velocity may be."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from train.ode import METHODS, integrate


def spin(x: Tensor) -> Tensor:
    """x' = A x with a rotation, which has an exact solution."""
    return torch.stack([-x[..., 1], x[..., 0]], dim=-1)


def exact(x0: Tensor, T: float) -> Tensor:
    c, s = math.cos(T), math.sin(T)
    return x0 @ torch.tensor([[c, s], [-s, c]], dtype=x0.dtype)


@pytest.mark.parametrize("name", METHODS)
def test_the_measured_order_is_the_declared_one(name: str) -> None:
    x0 = torch.tensor([[[1.0, 0.5]]], dtype=torch.float64)
    errors = []
    counts = [16, 32, 64]
    for steps in counts:
        end = integrate(spin, x0, name, steps, T=1.5).state
        errors.append(float((end - exact(x0, 1.5)).norm()))
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


def test_masked_positions_do_not_count_in_the_cost() -> None:
    v = torch.ones(1, 3, 4)
    v[:, 2] = 100
    mask = torch.tensor([[True, True, False]])
    assert float(integrate(lambda x: v, v, "euler", 2, mask=mask).cost) == pytest.approx(1.0)


def test_gradients_match_finite_differences() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        path = integrate(lambda y: torch.tanh(y @ weight), x, "heun", 3)
        return path.state.square().sum() + path.cost.double()

    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def state_only(x: Tensor, weight: Tensor) -> Tensor:
        return integrate(lambda y: torch.tanh(y @ weight), x, "heun", 3).state

    assert torch.autograd.gradcheck(state_only, (x, weight))
    loss(x, weight).backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_bad_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        integrate(spin, torch.zeros(1, 1, 2), "euler", 0)
    with pytest.raises(ValueError, match="choose one of euler, ab2"):
        integrate(spin, torch.zeros(1, 1, 2), "leapfrog", 1)
