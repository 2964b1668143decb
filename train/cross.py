"""Blocks that also attend to a memory: the decoder's half of a translator.

A block is called block(x, memory, memory_mask) and maps (B, N, D) to (B, N, D). Nothing here knows
where a memory comes from.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import Activation, Attention, FeedForward, Norm, RelativeAttention


class CrossAttention(nn.Module):
    """Multi-head attention: queries from the state, keys and values from the memory."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        B, N, D = x.shape
        S, H = memory.shape[1], self.heads
        q = self.query(x).view(B, N, H, D // H).transpose(1, 2)  # (B, H, N, D/H)
        k, v = (
            part.view(B, S, H, D // H).transpose(1, 2)  # (B, H, S, D/H)
            for part in self.kv(memory).chunk(2, dim=-1)
        )
        allowed = None if memory_mask is None else memory_mask[:, None, None, :]
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=self.dropout if self.training else 0.0
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, N, D))  # (B, N, D)
        return out


class CrossBlock(nn.Module):
    """Causal self-attention, attention to the memory and feed-forward, each with a skip.

    Norms stand before, after, or nowhere. Without hidden units there is no feed-forward.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        norm: Norm = "pre",
        dropout: float = 0.0,
        activation: Activation = "gelu",
        bias: bool = True,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        reach: int = 0,
    ) -> None:
        super().__init__()

        def new_norm() -> nn.Module:
            return nn.Identity() if norm == "none" else nn.LayerNorm(width, bias=bias)

        self.norm = norm
        self.attention: Attention | RelativeAttention
        if reach:
            self.attention = RelativeAttention(width, heads, True, reach, attention_dropout, bias)
        else:
            self.attention = Attention(width, heads, True, attention_dropout, bias)
        self.norm1 = new_norm()
        self.cross_attention = CrossAttention(width, heads, attention_dropout, bias)
        self.norm2 = new_norm()
        self.drop = nn.Dropout(dropout)
        self.feedforward: FeedForward | None = None
        if hidden:
            self.feedforward = FeedForward(width, hidden, activation, bias, activation_dropout)
            self.norm3 = new_norm()

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        if self.norm == "post":
            x = self.norm1(x + self.drop(self.attention(x)))
            x = self.norm2(x + self.drop(self.cross_attention(x, memory, memory_mask)))
            if self.feedforward is not None:
                x = self.norm3(x + self.drop(self.feedforward(x)))
        else:
            x = x + self.drop(self.attention(self.norm1(x)))
            x = x + self.drop(self.cross_attention(self.norm2(x), memory, memory_mask))
            if self.feedforward is not None:
                x = x + self.drop(self.feedforward(self.norm3(x)))
        return x
