"""OT-Transformers: embed, integrate a velocity over [0, T], read out.

The plug-and-play form is `OTTransformer(embed, velocity, head)`: any module that maps (B, N, D) to
(B, N, D) can be the velocity. With `depth="discrete"` the same parts make the ordinary transformer
x -> head(velocity(x)), the baseline. Nothing here knows about data or training.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from train.ode import Observer
from train.positions import Positions
from train.travel import Depth, Embedded, Leg, travel


class Output(NamedTuple):
    logits: Tensor
    cost: Tensor  # (): the transport cost of all legs
    evaluations: int  # of velocities
    legs: tuple[Leg, ...]  # the trajectories, the one that is read out last
    context: tuple[Tensor, ...] = ()  # what the head sees beside the state


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
    """Next-token logits at every position."""

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


class Stepped(nn.Module):
    """A model that is asked for a number of steps: model(*inputs, steps=4) -> Output."""

    head: nn.Module

    def __init__(self, T: float, depth: Depth) -> None:
        super().__init__()
        self.T, self.depth = T, depth
        self.checkpoint = False  # recompute each step going backward
        self.tolerance: float | None = None  # of a solver that picks its own steps

    @property
    def discrete(self) -> bool:
        """Whether its depth is fixed: every number of steps is the same."""
        return self.depth == "discrete"

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
    ) -> Output:
        start = as_embedded(self.embed(*inputs))
        state, cost, evaluations, legs = travel(
            self.velocity,
            start,
            self.depth,
            steps,
            method,
            self.T,
            observe,
            self.saving,
            self.tolerance,
        )
        logits = self.head(state, *start.context)
        return Output(logits, cost, evaluations, legs, start.context)


def as_embedded(made: Tensor | Embedded) -> Embedded:
    """What an embedding gave: a plain module gives the state alone."""
    return made if isinstance(made, Embedded) else Embedded(made)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
