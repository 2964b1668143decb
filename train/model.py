"""OT-Transformers: embed, integrate a velocity over [0, T], read out.

The plug-and-play form is `OTTransformer(embed, velocity, head)`: any module that maps (B, N, D) to
(B, N, D) can be the velocity. With `depth="discrete"` the same parts make the ordinary transformer
x -> head(velocity(x)), the baseline. Nothing here knows about data or training.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from train.blocks import Block, BlockVelocity, initialise
from train.config import ModelConfig
from train.ode import integrate, mean_square


class Output(NamedTuple):
    logits: Tensor
    cost: Tensor  # (): the transport cost of the trajectory


class Embedding(nn.Module):
    """Token plus learned position embeddings; a pad id makes a mask of the positions that exist."""

    def __init__(
        self, vocabulary: int, window: int, width: int, pad_id: int | None, dropout: float
    ) -> None:
        super().__init__()
        self.window, self.pad_id = window, pad_id
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(window, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        N = tokens.shape[1]
        x = self.tokens(tokens) + self.positions.weight[:N]  # (B, N, D)
        mask = None if self.pad_id is None else tokens != self.pad_id  # (B, N)
        return self.drop(x), mask


class TokenHead(nn.Module):
    """Next-token logits at every position."""

    def __init__(self, width: int, vocabulary: int, norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.linear = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))  # (B, N, V)
        return logits


class PooledHead(nn.Module):
    """Class logits from the mean or the maximum over the positions that exist."""

    def __init__(self, width: int, classes: int, norm: bool, pool: str, dropout: float) -> None:
        super().__init__()
        self.pool = pool
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        present = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
        if self.pool == "max":
            pooled = (x * present - (1 - present) * 1e4).amax(1)
        else:
            pooled = (x * present).sum(1) / present.sum(1)
        logits: Tensor = self.linear(self.drop(pooled))  # (B, classes)
        return logits


class OTTransformer(nn.Module):
    """embed -> x' = velocity(x) over [0, T] -> head."""

    def __init__(
        self,
        embed: nn.Module,
        velocity: nn.Module,
        head: nn.Module,
        T: float = 1.0,
        discrete: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.velocity, self.head = embed, velocity, head
        self.T, self.discrete = T, discrete

    def forward(self, tokens: Tensor, steps: int, method: str = "euler") -> Output:
        x0, mask = self.embed(tokens)  # (B, N, D), (B, N)
        velocity = self.velocity if mask is None else Masked(self.velocity, mask)
        if self.discrete:
            x = velocity(x0)
            return Output(self.head(x, mask), mean_square(x - x0, mask).detach())
        path = integrate(velocity, x0, method, steps, self.T, mask)
        return Output(self.head(path.state, mask), path.cost)


class Masked:
    """A velocity that sees only the positions of a mask."""

    def __init__(self, velocity: nn.Module, mask: Tensor) -> None:
        self.velocity, self.mask = velocity, mask
        self.timed: bool = getattr(velocity, "timed", False)

    def __call__(self, x: Tensor, *time: float) -> Tensor:
        out: Tensor = self.velocity(x, self.mask, *time)
        return out


def build_model(config: ModelConfig, vocabulary: int, classes: int | None) -> OTTransformer:
    """The decoder or the encoder that a recipe describes."""
    c = config
    causal = c.family == "decoder"
    if causal == (classes is not None):
        raise ValueError(
            "a decoder predicts tokens and an encoder classes; data and model disagree"
        )
    embed = Embedding(vocabulary, c.window, c.width, None if causal else 0, c.embed_dropout)
    blocks = [Block(c.width, c.heads, c.hidden, causal, c.norm, c.dropout) for _ in range(c.layers)]
    velocity = BlockVelocity(blocks, c.width, c.final_norm == "inside")
    norm = c.final_norm == "outside"
    head: nn.Module
    if classes is None:
        head = TokenHead(c.width, vocabulary, norm)
    else:
        head = PooledHead(c.width, classes, norm, c.pool, c.dropout)
    model = OTTransformer(embed, velocity, head, c.T, discrete=c.depth == "discrete")
    initialise(model, c.layers)
    return model


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
