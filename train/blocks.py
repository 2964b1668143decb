"""Transformer blocks, and the velocity that composes them.

A block maps (B, N, D) to (B, N, D) and keeps its own inner skip connections. Nothing here knows
about steps, embeddings or heads.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["pre", "post", "none"]


class Attention(nn.Module):
    """Multi-head self-attention, causal or over all positions that the mask allows."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, D = x.shape
        q, k, v = (
            part.view(B, N, self.heads, D // self.heads).transpose(1, 2)  # (B, H, N, D/H)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        allowed = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            is_causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, N, D))  # (B, N, D)
        return out


class FeedForward(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each with a skip; norms before, after, or nowhere."""

    def __init__(
        self, width: int, heads: int, hidden: int, causal: bool, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.norm = norm
        self.attention = Attention(width, heads, causal, 0.0)
        self.feedforward = FeedForward(width, hidden)
        self.norm1: nn.Module = nn.Identity() if norm == "none" else nn.LayerNorm(width)
        self.norm2: nn.Module = nn.Identity() if norm == "none" else nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norm == "post":
            x = self.norm1(x + self.drop(self.attention(x, mask)))
            x = self.norm2(x + self.drop(self.feedforward(x)))
        else:
            x = x + self.drop(self.attention(self.norm1(x), mask))
            x = x + self.drop(self.feedforward(self.norm2(x)))
        return x


class BlockVelocity(nn.Module):
    """f = [norm o] f_L o ... o f_1: the whole stack, with one set of weights for every step."""

    def __init__(self, blocks: list[Block], width: int, final_norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm: nn.Module = nn.LayerNorm(width) if final_norm else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return x


def initialise(module: nn.Module, layers: int) -> None:
    """N(0, 0.02) as in GPT-2, smaller by sqrt(2 layers) where a block writes into its skip."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        into_skip = name.endswith(("attention.out.weight", "feedforward.down.weight"))
        deviation = 0.02 / (2 * layers) ** 0.5 if into_skip else 0.02
        with torch.no_grad():
            parameter.normal_(0.0, deviation)
    for module_ in module.modules():
        if isinstance(module_, nn.Linear) and module_.bias is not None:
            nn.init.zeros_(module_.bias)
