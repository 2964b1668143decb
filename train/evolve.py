"""Blocks whose attention is computed once, from their input, and then evolved over their depth.

Queries and keys would read the input of the block with a vector of time T beside it; their products
split into four terms, of which only T is new at every depth:

    logits[i, j] = Q[i] K[j] / sqrt(E)  +  A1[j] T  +  A2[i] T  +  A3 (T * T)

with A1 = K W for the columns W of the query's weights that read time. Q and K are split into heads
of width E for the first term. A1, A2 and A3 are of all of Q and K, have as many entries as T, and
are split into heads themselves, as in the released code: head h has its slice of A1 and of T. A2
and A3 add the same to a whole row, which the softmax takes away again; so they are not computed,
and the columns of the key's weights that read time learn nothing. They are kept for the published
numbers of parameters. There is no value projection. Time runs from 1 to the depth, in layers.

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
    columns: Tensor  # (B, H, M, T/H): what time adds to each column


class EvolvingLogits(nn.Module):
    """Attention logits between two inputs as a function of depth, but for what rows share."""

    waves: Tensor

    def __init__(
        self, width: int, heads: int, depth: int, time_width: int = 0, dropout: float = 0.0
    ) -> None:
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
        self.wave_scales = nn.ParameterList(
            torch.empty(times).uniform_(-limit, limit) for _ in range(depth)
        )
        angles = torch.arange(1, depth + 1)[:, None] * torch.arange(times // 2) * (math.pi / 64)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (depth, times)
        self.register_buffer("waves", waves, persistent=False)
        self.drop = nn.Dropout(dropout)  # of queries and keys

    def begin(self, x: Tensor, y: Tensor, allowed: Tensor | None) -> Origin:
        """From inputs x (B, N, D) and y (B, M, D), with attention where it is allowed."""
        query = self.drop(x @ self.query.weight[:, : self.width].T)  # (B, N, D + T)
        key = self.drop(y @ self.key.weight[:, : self.width].T)  # (B, M, D + T)
        queries, keys = self._heads(query), self._heads(key)  # (B, H, N or M, E)
        logits = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        if allowed is not None:
            # Finite, so that a row which may attend to nothing gives no NaN.
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min / 2)
        columns = self._heads(key @ self.query.weight[:, self.width :])  # (B, H, M, T/H)
        return Origin(logits, columns)

    def evolve(self, origin: Origin, layer: int) -> Tensor:
        """The logits (B, H, N, M) at a layer, from 0."""
        time = (self.wave_scales[layer] * self.waves[layer]).view(self.heads, -1, 1)  # (H, T/H, 1)
        column: Tensor = origin.columns @ time  # (B, H, M, 1)
        return origin.logits + column.transpose(-1, -2)

    def _heads(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        return x.view(B, N, self.heads, D // self.heads).transpose(1, 2)  # (B, H, N, D/H)


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
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal

        def new_logits() -> EvolvingLogits:
            return EvolvingLogits(width, heads, depth, time_width, attention_dropout)

        self.logits = new_logits()
        self.across = new_logits() if memory else None
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
                x = layer(x, self.logits.evolve(own, i))
        else:
            memory, *masks = context
            own = self.logits.begin(x, x, self._allowed(x))
            across = self.across.begin(x, memory, masks[0][:, None, None, :] if masks else None)
            for i, layer in enumerate(self.layers):
                logits = self.logits.evolve(own, i), self.across.evolve(across, i)
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
