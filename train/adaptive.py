"""Adaptive integration of x' = f(x, t): an embedded Runge-Kutta pair that chooses its own steps.

The steps are torchdiffeq's, of Dormand and Prince; gradients go back through every one of them.
Nothing here knows what is inside a velocity.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from train.ode import mean_square


class AdaptivePath(NamedTuple):
    """Where a trajectory ended, the integral of mean(f^2) along it, and what it took."""

    state: Tensor  # (B, N, D)
    cost: Tensor  # ()
    evaluations: int


class SolverError(RuntimeError):
    """The solver cannot go on; the message says what to change."""


def adaptive(
    velocity: nn.Module,
    x0: Tensor,
    context: tuple[Tensor, ...] = (),
    T: float = 1.0,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    present: Tensor | None = None,
) -> AdaptivePath:
    """Carry x0 (B, N, D) from 0 to T; only positions of `present` (B, N) move, count or steer.

    The cost is one more state of the ODE, but the steps follow from the error in x alone: a
    trajectory is the same whether its cost is used or not.
    """
    try:
        from torchdiffeq import odeint
    except ImportError:
        raise SolverError(
            "the adaptive solver needs torchdiffeq: install it, or set steps.solver=fixed"
        ) from None
    timed = getattr(velocity, "timed", False)
    dtype = torch.promote_types(x0.dtype, torch.float32)  # bf16 is too coarse for the tolerances
    moving = None if present is None else present[..., None].to(dtype)  # (B, N, 1)
    evaluations = 0

    def derivative(t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal evaluations
        evaluations += 1
        # A step of no size: the solver asks for the velocity of the ODE itself.
        time = (t, torch.zeros_like(t)) if timed else ()
        v = velocity(state[0], *context, *time).to(dtype)
        v = v if moving is None else v * moving
        return v, mean_square(v, present)

    def error(state: tuple[Tensor, Tensor]) -> Tensor:
        return mean_square(state[0], present).sqrt()

    start = (x0.to(dtype), x0.new_zeros((), dtype=torch.float32))
    ends = torch.tensor([0.0, T], device=x0.device)
    # Stopping at T exactly: else the last step goes beyond and the answer is interpolated.
    options = {"norm": error, "step_t": ends[1:]}
    try:
        states, costs = odeint(
            derivative, start, ends, rtol=rtol, atol=atol, method="dopri5", options=options
        )
    except AssertionError as failure:  # how torchdiffeq says that its steps became too small
        raise SolverError(
            f"the adaptive solver gave up after {evaluations} evaluations ({failure}): the "
            "velocity is too steep; lower optim.lr, or raise optim.transport or steps.tolerance"
        ) from None
    return AdaptivePath(states[-1], costs[-1], evaluations)
