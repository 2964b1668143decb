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
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from train.blocks import Block
from train.config import Function, Scheme
from train.ode import METHODS

HALVES: tuple[Literal["attention", "feedforward"], ...] = ("attention", "feedforward")
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


class HalfFunction(nn.Module):
    """F of one half of a block alone: of its attention, or of its feed-forward, less y."""

    def __init__(self, block: Block, half: Literal["attention", "feedforward"]) -> None:
        super().__init__()
        self.block, self.of = block, half

    def forward(self, y: Tensor, *context: Tensor) -> Tensor:
        if self.of == "attention":
            return self.block.attend(y, *context) - y
        return self.block.feed(y) - y


def halves(blocks: Iterable[Block], which: Function, scheme: Scheme) -> "RungeKuttaStack":
    """Both halves of each block as functions of their own; only `which` of them under the scheme.

    Figure 4 of the paper: F as attention, as feed-forward, or as each of the two ("halves").
    """
    functions: list[nn.Module] = []
    plain = set()
    for block in blocks:
        for half in HALVES:
            if which not in (half, "halves"):
                plain.add(len(functions))
            functions.append(HalfFunction(block, half))
    return RungeKuttaStack(functions, scheme, frozenset(plain))


class RungeKuttaStack(nn.Module):
    """Functions one after another under one scheme; those numbered `plain` are y + F(y)."""

    def __init__(
        self,
        functions: Iterable[nn.Module],
        scheme: Scheme,
        plain: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        if scheme not in get_args(Scheme):
            raise ValueError(
                f"unknown scheme {scheme!r}; choose one of {', '.join(get_args(Scheme))}"
            )
        if plain and scheme not in TABLEAUX:
            raise ValueError(
                f"scheme {scheme} looks back on what came before: it is of whole blocks"
            )
        self.functions, self.scheme, self.plain = nn.ModuleList(functions), scheme, plain
        self.weights = nn.ParameterList(
            torch.ones(count) for count in _learned(scheme, len(self.functions) - len(plain))
        )

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        states, changes = [x], list[Tensor]()
        learned = iter(self.weights)
        for i, function in enumerate(self.functions):
            y = states[-1]
            if i in self.plain:
                y = y + function(y, *context)
            elif self.scheme in TABLEAUX:
                weights = next(learned) if self.scheme == "rk2-learned" else None
                y = self._runge_kutta(function, y, weights, context)
            else:
                changes.append(function(y, *context))
                y = self._combine(i, states, changes, context)
            states.append(y)
        return states[-1]

    def _runge_kutta(
        self, function: nn.Module, y: Tensor, weights: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        table = TABLEAUX[self.scheme]
        stages: list[Tensor] = []
        for row in table.a:
            stages.append(function(_add(y, row, stages), *context))
        if weights is not None:
            return _add(y, weights.unbind(), stages)
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
