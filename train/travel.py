"""How an embedded input crosses the depth of a model: one ODE, a chain of ODEs, or one pass.

Knows velocities and the tensors that every evaluation sees; not what they mean.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

from torch import Tensor, nn

from train.adaptive import adaptive
from train.ode import Observer, integrate, mean_square, method_named

Depth = Literal["ode", "discrete", "chain"]


class Embedded(NamedTuple):
    """Where a trajectory starts, and what stays fixed along it."""

    state: Tensor  # (B, N, D)
    context: tuple[Tensor, ...] = ()  # what every evaluation and the head also see
    present: Tensor | None = None  # (B, N): positions that count in the transport cost


class Leg(NamedTuple):
    """One trajectory: its ends, and what its length is measured by."""

    start: Tensor  # (B, N, D)
    end: Tensor  # (B, N, D)
    present: Tensor | None
    T: float

    @property
    def least(self) -> Tensor:
        """The cost of going straight from start to end at constant speed: no path costs less."""
        return mean_square(self.end - self.start, self.present) / self.T


class Journey(NamedTuple):
    """A crossing of the whole depth."""

    state: Tensor  # (B, N, D)
    cost: Tensor  # (): the transport cost
    evaluations: int  # of velocities
    legs: tuple[Leg, ...]
    exits: tuple[Tensor, ...] = ()  # (B, N, D) each: the states after the counts asked for


class Bound:
    """A velocity with its context: a function of the state, and of time if it is timed."""

    def __init__(self, velocity: nn.Module, context: tuple[Tensor, ...]) -> None:
        self.velocity, self.context = velocity, context
        self.timed: bool = getattr(velocity, "timed", False)

    def __call__(self, x: Tensor, *time: float) -> Tensor:
        out: Tensor = self.velocity(x, *self.context, *time)
        return out


def travel(
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
) -> Journey:
    """Carry the embedded input to the end of the model's depth.

    With a tolerance the solver picks its own steps, and `steps` and `method` mean nothing.
    States on the way are those of one ODE: a chain has none that could be read out.
    """
    assert not exits or depth == "ode"
    x, context, present = start
    if depth == "discrete":
        end = velocity(x, *context)
        # Detached: it is measured, but there is no way to straighten.
        leg = Leg(x.detach(), end.detach(), present, 1.0)
        return Journey(end, leg.least, 1, (leg,))
    cost, evaluations = x.new_zeros(()), 0
    legs: list[Leg] = []
    passed: tuple[Tensor, ...] = ()
    for one in flows(velocity, depth):
        if tolerance is None:
            bound = Bound(one, context)
            state, spent, passed = integrate(
                bound, x, method, steps, T, present, observe, checkpoint, exits, backprop
            )
            evaluations += steps * method_named(method).evaluations
        else:
            state, spent, evaluated = adaptive(one, x, context, T, tolerance, tolerance, present)
            evaluations += evaluated
        legs.append(Leg(x, state, present, T))
        x, cost = state, cost + spent
    return Journey(x, cost, evaluations, tuple(legs), passed)


def flows(velocity: nn.Module, depth: Depth) -> list[nn.Module]:
    """The velocities of a model, in the order in which they are integrated."""
    if depth == "chain":
        assert isinstance(velocity, nn.ModuleList)
        return list(velocity)
    return [velocity]
