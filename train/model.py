"""OT-Transformers: embed, integrate a velocity over [0, T], read out.

The plug-and-play form is `OTTransformer(embed, velocity, head)`: any module that maps (B, N, D) to
(B, N, D) can be the velocity. With `depth="discrete"` the same parts make the ordinary transformer
x -> head(velocity(x)), the baseline. Nothing here knows about data or training.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from train.ode import Observer
from train.positions import Positions
from train.travel import Depth, Embedded, Leg, travel

Dial = Literal["resolution", "time"]
INJECTED = 0.1  # first gain of an injection: a larger one drowns what the blocks write, for long


class Output(NamedTuple):
    logits: Tensor
    cost: Tensor  # (): the transport cost of all legs
    evaluations: int  # of velocities
    legs: tuple[Leg, ...]  # the trajectories, the one that is read out last
    context: tuple[Tensor, ...] = ()  # what the head sees beside the state
    early: tuple[Tensor, ...] = ()  # the logits after the counts asked for, in their order


class Embedding(nn.Module):
    """Token plus position embeddings; a pad id makes a mask of the positions that exist."""

    def __init__(
        self,
        vocabulary: int,
        window: int,
        width: int,
        pad_id: int | None,
        dropout: float = 0.0,
        positions: str = "learned",
    ) -> None:
        super().__init__()
        self.window, self.pad_id = window, pad_id
        self.scale = width**0.5 if positions == "sinusoidal" else 1.0  # else the sines drown tokens
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = Positions(window, width, positions)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Embedded:
        x = self.tokens(tokens) * self.scale + self.positions(tokens.shape[1])  # (B, N, D)
        if self.pad_id is None:
            return Embedded(self.drop(x))
        mask = tokens != self.pad_id  # (B, N)
        return Embedded(self.drop(x), (mask,), mask)


class TokenHead(nn.Module):
    """Logits at every position: of the next token, or of a label."""

    def __init__(self, width: int, vocabulary: int, norm: bool, bias: bool = True) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width, bias=bias) if norm else nn.Identity()
        self.linear = nn.Linear(width, vocabulary, bias=bias)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))  # (B, N, V)
        return logits


class PooledHead(nn.Module):
    """Class logits from the mean, the maximum or the first of the positions that exist.

    With `norm` every position is normalised before, with `norm_pooled` what was pooled is. There
    may be layers as wide as the model, each with a ReLU, before the one that reads out.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        norm: bool,
        pool: str,
        dropout: float,
        norm_pooled: bool = False,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.norm_pooled: nn.Module = nn.LayerNorm(width) if norm_pooled else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        if self.pool == "first":
            pooled = x[:, 0]
        elif mask is None:
            pooled = x.amax(1) if self.pool == "max" else x.mean(1)
        else:
            present = mask[..., None].to(x.dtype)
            if self.pool == "max":
                pooled = (x * present - (1 - present) * 1e4).amax(1)
            else:
                pooled = (x * present).sum(1) / present.sum(1)
        pooled = self.norm_pooled(pooled)
        for layer in self.layers:
            pooled = layer(pooled).relu()
        logits: Tensor = self.linear(self.drop(pooled))  # (B, classes)
        return logits


class Prelude(nn.Module):
    """An embedding, blocks of its own behind it, and what of it is injected into the loop.

    The injection is W norm(x0), the first of the context. It is the same at every evaluation, so
    it is computed once.
    """

    def __init__(
        self, embed: nn.Module, blocks: Iterable[nn.Module], width: int, inject: bool
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.inject = embed, nn.ModuleList(blocks), inject
        if inject:
            self.norm = nn.LayerNorm(width)
            nn.init.constant_(self.norm.weight, INJECTED)
            self.project = nn.Linear(width, width, bias=False)

    def forward(self, *inputs: Tensor) -> Embedded:
        x, context, present = as_embedded(self.embed(*inputs))
        for block in self.blocks:
            x = block(x, *context)
        if self.inject:
            context = (self.injected(x), *context)
        return Embedded(x, context, present)

    def injected(self, x: Tensor) -> Tensor:
        """What every evaluation sees of an embedded input (B, N, D)."""
        injection: Tensor = self.project(self.norm(x))
        return injection


class Coda(nn.Module):
    """Blocks of its own behind the loop, and the head; neither sees what was injected."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Module, injected: bool) -> None:
        super().__init__()
        self.blocks, self.head, self.injected = nn.ModuleList(blocks), head, injected

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x, context = self.behind(x, *context)
        logits: Tensor = self.head(x, *context)
        return logits

    def behind(self, x: Tensor, *context: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The state behind the blocks, and what the head sees beside it."""
        context = context[1:] if self.injected else context
        for block in self.blocks:
            x = block(x, *context)
        return x, context


class Stepped(nn.Module):
    """A model that is asked for a number of steps: model(*inputs, steps=4) -> Output."""

    head: nn.Module

    def __init__(self, T: float, depth: Depth) -> None:
        super().__init__()
        self.T, self.depth = T, depth
        self.checkpoint = False  # recompute each step going backward
        self.tolerance: float | None = None  # of a solver that picks its own steps
        self.dial: Dial = "resolution"
        self.full = 1  # the count that [0, T] is crossed in
        self.backprop = 0  # steps that gradients go back through; 0: all

    @property
    def discrete(self) -> bool:
        """Whether its depth is fixed: every number of steps is the same."""
        return self.depth == "discrete"

    def span(self, steps: int) -> tuple[float, float]:
        """The size of a step, and the time at which so many steps end.

        With the dial of resolution any number of steps crosses [0, T]. With that of time a step is
        always T / full, and more steps than `full` go on beyond T.
        """
        if self.dial == "resolution":
            return self.T / steps, self.T
        return self.T / self.full, self.T * steps / self.full

    @property
    def saving(self) -> bool:
        return self.checkpoint and torch.is_grad_enabled()


class OTTransformer(Stepped):
    """embed -> x' = velocity(x) over [0, T] -> head."""

    def __init__(
        self,
        embed: nn.Module,
        velocity: nn.Module,
        head: nn.Module,
        T: float = 1.0,
        depth: Depth = "ode",
    ) -> None:
        super().__init__(T, depth)
        self.embed, self.velocity, self.head = embed, velocity, head

    def forward(
        self,
        *inputs: Tensor,
        steps: int = 1,
        method: str = "euler",
        observe: Observer | None = None,
        exits: tuple[int, ...] = (),
    ) -> Output:
        """The answer after `steps`, and on the way there after each of `exits`, ascending."""
        start = as_embedded(self.embed(*inputs))
        state, cost, evaluations, legs, passed = travel(
            self.velocity,
            start,
            self.depth,
            steps,
            method,
            self.span(steps)[1],
            observe,
            self.saving,
            self.tolerance,
            exits,
            self.backprop,
        )
        early = tuple(self.head(each, *start.context) for each in passed)
        logits = self.head(state, *start.context)
        return Output(logits, cost, evaluations, legs, start.context, early)


def as_embedded(made: Tensor | Embedded) -> Embedded:
    """What an embedding gave: a plain module gives the state alone."""
    return made if isinstance(made, Embedded) else Embedded(made)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
