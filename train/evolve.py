"""Blocks whose attention is computed once, from their input, and then evolved over their depth.

Queries and keys read the input of the block with a vector of time beside it. The products split
into those of input with input, computed once, and those with time, cheap at every depth. There is
no value projection. Time runs from 1 to the depth of the block, in layers.

A block is called block(x, mask), or block(x, memory, memory_mask) where it attends to a memory.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from train.blocks import FeedForward
from train.rotation import RandomFeedForward


class Origin(NamedTuple):
    """What the input of a block fixes for all its depths."""

    logits: Tensor  # (B, H, N, M): products of queries and keys, less where there is no attention
    query: Tensor  # (B, H, N, E)
    key: Tensor  # (B, H, M, E)


class EvolvingLogits(nn.Module):
    """Attention logits between two inputs as a function of depth."""

    waves: Tensor

    def __init__(self, width: int, heads: int, depth: int, time_width: int = 0) -> None:
        """`time_width` is of each head; 0 makes it as wide as the head."""
        super().__init__()
        times = heads * (time_width or width // heads)
        if width % heads or times % 2:
            raise ValueError(
                f"width {width} must be a multiple of heads {heads}, and heads * time_width even"
            )
        self.width, self.heads = width, heads
        self.query = nn.Linear(width + times, width + times, bias=False)
        self.key = nn.Linear(width + times, width + times, bias=False)
        limit = math.sqrt(6 / heads)
        self.scales = nn.ParameterList(
            torch.empty(times).uniform_(-limit, limit) for _ in range(depth)
        )
        angles = torch.arange(1, depth + 1)[:, None] * torch.arange(times // 2) * (math.pi / 64)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (depth, times)
        self.register_buffer("waves", waves, persistent=False)

    def begin(self, x: Tensor, y: Tensor, allowed: Tensor | None) -> Origin:
        """From inputs x (B, N, D) and y (B, M, D), with attention where it is allowed."""
        query = self._heads(x @ self.query.weight[:, : self.width].T)  # (B, H, N, E)
        key = self._heads(y @ self.key.weight[:, : self.width].T)  # (B, H, M, E)
        logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if allowed is not None:
            # Finite, so that a row which may attend to nothing gives no NaN.
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min / 2)
        return Origin(logits, query, key)

    def evolve(self, origin: Origin, layer: int, rows: bool = True) -> Tensor:
        """The logits (B, H, N, M) at a layer, from 0.

        Without `rows` they lack the terms that are the same along a row: softmax cannot see them,
        and they cost another pass over the logits.
        """
        time = self.time(layer)
        query = (self.query.weight[:, self.width :] @ time).view(self.heads, -1, 1)  # (H, E, 1)
        scale = 1 / math.sqrt(query.shape[1])
        column: Tensor = origin.key @ query  # (B, H, M, 1)
        logits = origin.logits + scale * column.transpose(-1, -2)
        if not rows:
            return logits
        key = (self.key.weight[:, self.width :] @ time).view(self.heads, -1, 1)  # (H, E, 1)
        row: Tensor = origin.query @ key + (query * key).sum(1, keepdim=True)  # (B, H, N, 1)
        return logits + scale * row

    def direct(self, x: Tensor, y: Tensor, layer: int) -> Tensor:
        """The same logits, unmasked, as products of queries and keys of the augmented inputs."""
        time = self.time(layer)
        query = self._heads(self.query(_beside(x, time)))
        key = self._heads(self.key(_beside(y, time)))
        logits: Tensor = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return logits

    def time(self, layer: int) -> Tensor:
        """The vector of time at a layer: sines and cosines, each with a learned scale."""
        time: Tensor = self.scales[layer] * self.waves[layer]
        return time

    def _heads(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        return x.view(B, N, self.heads, D // self.heads).transpose(1, 2)  # (B, H, N, E)


class EvolvedAttention(nn.Module):
    """The norm of what is attended to, mixed by given logits; no value projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        B, M, D = y.shape
        values = self.norm(y).view(B, M, self.heads, D // self.heads)
        values = values.transpose(1, 2)  # (B, H, M, D/H)
        mixed = logits.softmax(-1) @ values  # (B, H, N, D/H)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))  # (B, N, D)
        return out


class EvolvedLayer(nn.Module):
    """One depth of a block: attention, attention to the memory, feed-forward, each with a skip."""

    def __init__(
        self, width: int, heads: int, feedforward: nn.Module, memory: bool, dropout: float
    ) -> None:
        super().__init__()
        self.attention = EvolvedAttention(width, heads)
        self.cross_attention = EvolvedAttention(width, heads) if memory else None
        self.norm, self.feedforward = nn.LayerNorm(width), feedforward
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, logits: Tensor, across: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        x = x + self.drop(self.attention(logits, x))
        if self.cross_attention is not None:
            x = x + self.drop(self.cross_attention(across, memory))
        x = x + self.drop(self.feedforward(self.norm(x)))
        return x


class EvolvedBlock(nn.Module):
    """Layers of their own weights under one evolving attention, and a norm at the end."""

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        hidden: int,
        feedforward: Literal["full", "random"] = "full",
        time_width: int = 0,
        causal: bool = False,
        memory: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.logits = EvolvingLogits(width, heads, depth, time_width)
        self.across = EvolvingLogits(width, heads, depth, time_width) if memory else None
        self.layers = nn.ModuleList(
            EvolvedLayer(
                width,
                heads,
                FeedForward(width, hidden, "relu")
                if feedforward == "full"
                else RandomFeedForward(width, hidden, layer + 1),
                memory,
                dropout,
            )
            for layer in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        if self.across is None:
            own = self.logits.begin(x, x, self._allowed(x, *context))
            for i, layer in enumerate(self.layers):
                x = layer(x, self.logits.evolve(own, i, rows=False))
        else:
            memory, *masks = context
            own = self.logits.begin(x, x, self._allowed(x))
            across = self.across.begin(x, memory, masks[0][:, None, None, :] if masks else None)
            for i, layer in enumerate(self.layers):
                logits = (
                    self.logits.evolve(own, i, rows=False),
                    self.across.evolve(across, i, rows=False),
                )
                x = layer(x, *logits, memory)
        out: Tensor = self.norm(x)
        return out

    def _allowed(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Where self-attention may look: (1 or B, 1, 1 or N, N)."""
        present = None if mask is None else mask[:, None, None, :]
        if not self.causal:
            return present
        N = x.shape[1]
        past = torch.ones(1, 1, N, N, dtype=torch.bool, device=x.device).tril()
        return past if present is None else past & present


class EvolvedStack(nn.Module):
    """Blocks one after another, each with an attention of its own."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *context)
        return x


def _beside(x: Tensor, time: Tensor) -> Tensor:
    return torch.cat([x, time.expand(*x.shape[:2], -1)], dim=-1)  # (B, N, D + T)
