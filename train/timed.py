"""The velocity of a neural ODE transformer: one block whose affine layers know the time.

    f(x, t) = FFN_t(a x + attention(x)),   every affine layer of FFN_t being A x + b + c t

There is neither norm nor dropout. Attention depends on time in the same way, or not at all. Which
times it is asked at, and how many such velocities follow each other, is not known here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import Attention


class TimedLinear(nn.Module):
    """A x + b + c t."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.affine = nn.Linear(inputs, outputs)
        self.drift = nn.Parameter(torch.empty(outputs))  # c
        nn.init.uniform_(self.drift, -(inputs**-0.5), inputs**-0.5)  # as the bias

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        out: Tensor = self.affine(x) + self.drift * t
        return out


class TimedAttention(nn.Module):
    """Attention whose affine layers, of queries, keys, values and the output, know the time."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = TimedLinear(width, 3 * width), TimedLinear(width, width)

    def forward(self, x: Tensor, t: float | Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, D = x.shape
        q, k, v = (
            part.view(B, N, self.heads, D // self.heads).transpose(1, 2)  # (B, H, N, D/H)
            for part in self.qkv(x, t).chunk(3, dim=-1)
        )
        allowed = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2), t)  # (B, N, D)
        return out


class TimedVelocity(nn.Module):
    """One block; `inner_skip` is whether a = 1, `timed_attention` whether attention knows t."""

    timed = True

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        inner_skip: bool,
        causal: bool = False,
        timed_attention: bool = False,
    ) -> None:
        super().__init__()
        self.inner_skip, self.timed_attention = inner_skip, timed_attention
        self.attention: nn.Module = (
            TimedAttention(width, heads, causal)
            if timed_attention
            else Attention(width, heads, causal)
        )
        self.up, self.down = TimedLinear(width, hidden), TimedLinear(hidden, width)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        *context, t, _ = rest  # the velocity does not depend on the size of the step
        time = (t,) if self.timed_attention else ()
        y = self.attention(x, *time, *context)  # (B, N, D)
        y = x + y if self.inner_skip else y
        out: Tensor = self.down(F.relu(self.up(y, t)), t)
        return out
