"""Integration of x' = f(x): methods as data, one loop of fixed steps, and one adaptive solver.

A velocity is any callable from (B, N, D) to (B, N, D). One whose attribute `timed` is true is
called with (x, t, h) instead.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from train.interrupt import SolverError

Velocity = Callable[..., Tensor]
Observer = Callable[[int, float, Tensor, Tensor], None]  # step, t, x, v at the start of each step


@dataclass(frozen=True, slots=True)
class Method:
    """An explicit Runge-Kutta tableau, or one evaluation a step combined with the one before."""

    name: str
    order: int
    a: tuple[tuple[float, ...], ...]  # row i weighs the stages before stage i
    b: tuple[float, ...]  # weights of the stages in the step
    c: tuple[float, ...]  # times of the stages, as fractions of the step
    history: float = 0.0  # x += h ((1 + history) v - history v_prev)

    @property
    def evaluations(self) -> int:
        return len(self.b)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("euler", 1, ((),), (1.0,), (0.0,)),
        Method("ab2", 2, ((),), (1.0,), (0.0,), history=0.5),
        Method("midpoint", 2, ((), (0.5,)), (0.0, 1.0), (0.0, 0.5)),
        Method("heun", 2, ((), (1.0,)), (0.5, 0.5), (0.0, 1.0)),
        Method(
            "rk4",
            4,
            ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)),
            (1 / 6, 1 / 3, 1 / 3, 1 / 6),
            (0.0, 0.5, 0.5, 1.0),
        ),
    )
}


class Path(NamedTuple):
    """Where a trajectory ended and what it cost: sum over steps of h * mean(f^2).

    The evaluations of a step have the same weights in the cost as in the step itself.
    """

    state: Tensor  # (B, N, D)
    cost: Tensor  # ()
    exits: tuple[Tensor, ...] = ()  # the states after the counts asked for


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def integrate(
    velocity: Velocity,
    x0: Tensor,
    method: str = "euler",
    steps: int = 1,
    T: float = 1.0,
    mask: Tensor | None = None,
    observe: Observer | None = None,
    checkpoint: bool = False,
    exits: Collection[int] = (),
    backprop: int = 0,
) -> Path:
    """Carry x0 from 0 to T in `steps` steps; only positions of `mask` (B, N) count in the cost.

    With `checkpoint` a step keeps only the state it starts from, and runs again going backward;
    not one that only an answer ends with. With `backprop` gradients go back through so many steps
    at most: from the end, and from those of `exits` that lie before it. Steps that none of them
    reaches are taken without gradients.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    table = method_named(method)
    h = T / steps
    x, cost = x0, x0.new_zeros((), dtype=torch.float32)
    before: Tensor | None = None
    passed: list[Tensor] = []
    last = velocity.last if isinstance(velocity, Bound) else None
    for m in range(steps):
        t = T * m / steps  # a fraction of the interval: adding h up would drift
        start = x
        ending = m + 1 == steps or m + 1 in exits
        v: Tensor | None = last(start, t, h) if last is not None and ending else None
        if v is not None and m + 1 == steps:
            if observe is not None:
                observe(m, t, start, v)
            return Path(start.detach() + h * v, cost + h * mean_square(v, mask), tuple(passed))
        learning = torch.is_grad_enabled()
        if backprop and m and (steps - m) % backprop == 0:
            x, before = x.detach(), None if before is None else before.detach()
        if backprop:
            learning = learning and _reached(m, steps, backprop, exits)
        with torch.set_grad_enabled(learning):
            if checkpoint and learning:
                x, spent, first = recomputed(
                    _step, velocity, table, x, before, t, h, mask, use_reentrant=False
                )
            else:
                x, spent, first = _step(velocity, table, x, before, t, h, mask)
        cost = cost + spent
        if observe is not None:
            observe(m, t, start, first)
        if m + 1 in exits:
            passed.append(x if v is None else start.detach() + h * v)
        before = first if table.history else None  # held only where it is used
    return Path(x, cost, tuple(passed))


def _reached(m: int, steps: int, backprop: int, exits: Collection[int]) -> bool:
    """Whether gradients of the end or of an exit come to step m, in spans of `backprop` steps."""
    end = steps - (steps - m - 1) // backprop * backprop  # of the span that the step is in
    return end == steps or any(end - backprop < each <= end for each in exits)


def _step(
    velocity: Velocity,
    table: Method,
    x: Tensor,
    before: Tensor | None,
    t: float,
    h: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step: the new state, its part of the cost, and its first evaluation."""
    timed = getattr(velocity, "timed", False)
    stages: list[Tensor] = []
    for row, c in zip(table.a, table.c, strict=True):
        at = _advance(x, h, row, stages)
        stages.append(velocity(at, t + c * h, h) if timed else velocity(at))
    first = stages[0]
    if table.history and before is not None:
        # With other weights than the state's, a curved path could cost less than the straight one.
        now, then = 1 + table.history, table.history
        spent = h * (now * mean_square(first, mask) - then * mean_square(before, mask))
        return x + h * (now * first - then * before), spent, first
    spent = x.new_zeros((), dtype=torch.float32)
    for weight, stage in zip(table.b, stages, strict=True):
        if weight:
            spent = spent + (h * weight) * mean_square(stage, mask)
    return _advance(x, h, table.b, stages), spent, first


def mean_square(v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of v^2 over all elements, in float32; only over the positions of `mask` if given."""
    wide = v if v.dtype == torch.float64 else v.float()
    if mask is None:
        return wide.square().mean()
    square = wide.square().sum(-1) * mask  # (B, N)
    return square.sum() / (mask.sum() * v.shape[-1])


def _advance(x: Tensor, h: float, weights: tuple[float, ...], stages: list[Tensor]) -> Tensor:
    for weight, stage in zip(weights, stages, strict=True):
        if weight:
            x = x + (h * weight) * stage
    return x


# Adaptive integration of x' = f(x, t): an embedded Runge-Kutta pair that chooses its own steps.
# The steps are torchdiffeq's, of Dormand and Prince; gradients go back through every one of them.


class AdaptivePath(NamedTuple):
    """Where a trajectory ended, the integral of mean(f^2) along it, and what it took."""

    state: Tensor  # (B, N, D)
    cost: Tensor  # ()
    evaluations: int


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


# How an embedded input crosses the depth of a model: one ODE, a chain of ODEs, or one pass.


Depth = Literal["ode", "discrete", "chain"]


class Embedded(NamedTuple):
    """Where a trajectory starts, and what stays fixed along it."""

    state: Tensor  # (B, N, D)
    context: tuple[Tensor, ...] = ()  # what every evaluation and the head also see
    present: Tensor | None = None  # (B, N): positions that count in the transport cost


class Trajectory(NamedTuple):
    """One trajectory: its ends, and what its length is measured by."""

    start: Tensor  # (B, N, D)
    end: Tensor  # (B, N, D)
    present: Tensor | None
    T: float

    @property
    def least(self) -> Tensor:
        """The cost of going straight from start to end at constant speed: no path costs less."""
        return mean_square(self.end - self.start, self.present) / self.T


class Solution(NamedTuple):
    """A crossing of the whole depth."""

    state: Tensor  # (B, N, D)
    cost: Tensor  # (): the transport cost
    evaluations: int  # of velocities
    trajectories: tuple[Trajectory, ...]
    exits: tuple[Tensor, ...] = ()  # (B, N, D) each: the states after the counts asked for


class EndsApart:
    """A velocity of a dial of time whose shorter answers may end with a step of their own."""

    def last(self, x: Tensor, t: float, h: float, *context: Tensor) -> Tensor | None:
        """The velocity at x of such a step, where the step from t has one."""
        raise NotImplementedError


class Bound:
    """A velocity with its context: a function of the state, and of time if it is timed.

    It counts how often it is evaluated.
    """

    def __init__(self, velocity: nn.Module, context: tuple[Tensor, ...]) -> None:
        self.velocity, self.context = velocity, context
        self.timed: bool = getattr(velocity, "timed", False)
        self.evaluations = 0

    def __call__(self, x: Tensor, *time: float) -> Tensor:
        self.evaluations += 1
        out: Tensor = self.velocity(x, *self.context, *time)
        return out

    def last(self, x: Tensor, t: float, h: float) -> Tensor | None:
        """The velocity of a step that an answer ends with, where it is not that of any other."""
        if not isinstance(self.velocity, EndsApart):
            return None
        v = self.velocity.last(x, t, h, *self.context)
        self.evaluations += v is not None
        return v


def solve(
    velocity: nn.Module,
    start: Embedded,
    depth: Depth,
    steps: int,
    method: str = "euler",
    T: float = 1.0,
    observe: Observer | None = None,
    checkpoint: bool = False,
    tolerance: float | None = None,
    exits: Collection[int] = (),
    backprop: int = 0,
) -> Solution:
    """Carry the embedded input to the end of the model's depth.

    With a tolerance the solver picks its own steps, and `steps` and `method` mean nothing.
    States on the way are those of one ODE: a chain has none that could be read out.
    """
    assert not exits or depth == "ode"
    x, context, present = start
    if depth == "discrete":
        end = velocity(x, *context)
        # Detached: it is measured, but there is no way to straighten.
        trajectory = Trajectory(x.detach(), end.detach(), present, 1.0)
        return Solution(end, trajectory.least, 1, (trajectory,))
    cost, evaluations = x.new_zeros(()), 0
    trajectories: list[Trajectory] = []
    passed: tuple[Tensor, ...] = ()
    for one in flows(velocity, depth):
        if tolerance is None:
            bound = Bound(one, context)
            state, spent, passed = integrate(
                bound, x, method, steps, T, present, observe, checkpoint, exits, backprop
            )
            evaluations += bound.evaluations
        else:
            state, spent, evaluated = adaptive(one, x, context, T, tolerance, tolerance, present)
            evaluations += evaluated
        trajectories.append(Trajectory(x, state, present, T))
        x, cost = state, cost + spent
    return Solution(x, cost, evaluations, tuple(trajectories), passed)


def flows(velocity: nn.Module, depth: Depth) -> list[nn.Module]:
    """The velocities of a model, in the order in which they are integrated."""
    if depth == "chain":
        assert isinstance(velocity, nn.ModuleList)
        return list(velocity)
    return [velocity]
