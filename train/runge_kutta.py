"""Stacks of blocks whose functions are combined as a solver combines the stages of its steps.

A function F maps (B, N, D) to (B, N, D) without a skip around it; the scheme says how a stack
goes from y to y'. Every block has weights of its own, and one set of them for all its stages.

    residual     y' = y + F(y)
    rk2          y' = y + 1/2 F1 + 1/2 F2,                 F1 = F(y), F2 = F(y + F1)
    rk2-gamma1   y' = y + F1 + F2
    rk2-learned  y' = y + g1 F1 + g2 F2,                   g1, g2 learned for each block
    rk4          y' = y + 1/6 (F1 + 2 F2 + 2 F3 + F4),     the classic fourth-order method
    polynet      y' = y + F(y) + F(F(y))
    leapfrog     y' = y_before + 2 F(y)
    multistep    y' = k y + (1 - k) y_before + F(y),       k learned for each block
    dlcl         y' = y_0 + sum of w_l F(y_l) so far,      w learned for each block and l

What is learned starts where the scheme is the plain sum of all F.
"""

from collections.abc import Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from train.config import Scheme
from train.ode import METHODS

TABLEAUX = {
    "residual": METHODS["euler"],
    "rk2": METHODS["heun"],
    "rk2-gamma1": METHODS["heun"],
    "rk2-learned": METHODS["heun"],
    "rk4": METHODS["rk4"],
}


class BlockFunction(nn.Module):
    """F(y) = block(y) - y: attention and feed-forward merged into one function.

    The feed-forward reads y plus what attention made of it, so that y + F(y) is the block itself.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, y: Tensor, *context: Tensor) -> Tensor:
        out: Tensor = self.block(y, *context) - y
        return out


class RungeKuttaStack(nn.Module):
    """The functions of a stack, one a block, under one scheme."""

    def __init__(self, functions: Iterable[nn.Module], scheme: Scheme) -> None:
        super().__init__()
        if scheme not in get_args(Scheme):
            raise ValueError(
                f"unknown scheme {scheme!r}; choose one of {', '.join(get_args(Scheme))}"
            )
        self.functions, self.scheme = nn.ModuleList(functions), scheme
        self.weights = nn.ParameterList(
            torch.ones(count) for count in _learned(scheme, len(self.functions))
        )

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        states, changes = [x], list[Tensor]()
        for i, function in enumerate(self.functions):
            y = states[-1]
            if self.scheme in TABLEAUX:
                y = self._runge_kutta(i, y, context)
            else:
                changes.append(function(y, *context))
                y = self._combine(i, states, changes, context)
            states.append(y)
        return states[-1]

    def _runge_kutta(self, i: int, y: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        table = TABLEAUX[self.scheme]
        stages: list[Tensor] = []
        for row in table.a:
            stages.append(self.functions[i](_add(y, row, stages), *context))
        if self.scheme == "rk2-learned":
            return _add(y, self.weights[i].unbind(), stages)
        return _add(y, (1.0, 1.0) if self.scheme == "rk2-gamma1" else table.b, stages)

    def _combine(
        self, i: int, states: list[Tensor], changes: list[Tensor], context: tuple[Tensor, ...]
    ) -> Tensor:
        """The next state from those before it and the change F(y) at each of them."""
        y, change = states[-1], changes[-1]
        before = states[-2] if i else y
        if self.scheme == "polynet":
            out: Tensor = y + change + self.functions[i](change, *context)
            return out
        if self.scheme == "leapfrog":
            return before + 2 * change if i else y + change
        if self.scheme == "multistep":
            k: Tensor = self.weights[i]
            return before + k * (y - before) + change
        return _add(states[0], self.weights[i].unbind(), changes)


def _learned(scheme: Scheme, blocks: int) -> list[int]:
    """How many weights each block learns."""
    if scheme == "dlcl":
        return [i + 1 for i in range(blocks)]
    return {"rk2-learned": [2] * blocks, "multistep": [1] * blocks}.get(scheme, [])


def _add(y: Tensor, weights: Sequence[float | Tensor], stages: list[Tensor]) -> Tensor:
    for weight, stage in zip(weights, stages, strict=True):
        if isinstance(weight, Tensor) or weight:
            y = y + weight * stage
    return y
