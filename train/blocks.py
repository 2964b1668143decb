"""Transformer blocks, and the velocity that composes them.

A block maps (B, N, D) to (B, N, D) and keeps its own inner skip connections. Nothing here knows
about steps, embeddings or heads.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["pre", "post", "none"]
Activation = Literal["gelu", "relu", "erf-gelu"]  # gelu by tanh, as GPT-2; erf as BERT


class Attention(nn.Module):
    """Multi-head self-attention, causal or over all positions that the mask allows."""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        dropout: float = 0.0,
        bias: bool = True,
        project: bool = True,
        head_width: int = 0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.head_width = head_width or width // heads
        inner = heads * self.head_width
        if inner != width and not project:
            raise ValueError(f"heads of {head_width} need a projection back to width {width}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * inner, bias=bias)
        self.out: nn.Module = nn.Linear(inner, width, bias=bias) if project else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        q, k, v = (
            part.view(B, N, self.heads, self.head_width).transpose(1, 2)  # (B, H, N, D/H)
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
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, N, D)
        return out


class FeedForward(nn.Module):
    """Two linear layers around a GELU or a ReLU."""

    def __init__(
        self, width: int, hidden: int, activation: Activation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "relu":
            x = F.relu(x)
        else:
            x = F.gelu(x, approximate="none" if self.activation == "erf-gelu" else "tanh")
        out: Tensor = self.down(x)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each with a skip; norms before, after, or nowhere.

    Without hidden units the block is attention alone.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        causal: bool,
        norm: Norm = "pre",
        dropout: float = 0.0,
        activation: Activation = "gelu",
        bias: bool = True,
        project: bool = True,
        head_width: int = 0,
    ) -> None:
        super().__init__()

        def new_norm() -> nn.Module:
            return nn.Identity() if norm == "none" else nn.LayerNorm(width, bias=bias)

        self.norm = norm
        self.attention = Attention(width, heads, causal, 0.0, bias, project, head_width)
        self.norm1 = new_norm()
        self.drop = nn.Dropout(dropout)
        self.feedforward: FeedForward | None = None
        if hidden:
            self.feedforward = FeedForward(width, hidden, activation, bias)
            self.norm2 = new_norm()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norm == "post":
            x = self.norm1(x + self.drop(self.attention(x, mask)))
            if self.feedforward is not None:
                x = self.norm2(x + self.drop(self.feedforward(x)))
        else:
            x = x + self.drop(self.attention(self.norm1(x), mask))
            if self.feedforward is not None:
                x = x + self.drop(self.feedforward(self.norm2(x)))
        return x


class BlockVelocity(nn.Module):
    """f = [norm o] f_L o ... o f_1: the whole stack, with one set of weights for every step."""

    def __init__(
        self, blocks: Iterable[nn.Module], width: int, final_norm: bool, bias: bool = True
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm: nn.Module = nn.LayerNorm(width, bias=bias) if final_norm else nn.Identity()

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *context)
        x = self.norm(x)
        return x


class Conditioned(nn.Module):
    """A velocity that sees the size of its step: scales and shifts that begin as nothing."""

    timed = True

    def __init__(self, velocity: nn.Module, width: int, hidden: int = 32) -> None:
        super().__init__()
        self.velocity = velocity
        self.up, self.down = nn.Linear(1, hidden), nn.Linear(hidden, 3 * width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        *context, _, h = rest  # h for all rows, or (B, 1, 1)
        size = torch.log2(torch.as_tensor(h, dtype=x.dtype, device=x.device)).reshape(-1, 1, 1)
        scale, shift, gain = self.down(torch.tanh(self.up(size))).chunk(3, -1)  # (R, 1, D) each
        out: Tensor = self.velocity(x * (1 + scale) + shift, *context) * (1 + gain)
        return out


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
        if isinstance(module_, Conditioned):
            nn.init.zeros_(module_.down.weight)
