"""The velocity of a neural ODE transformer: one block whose affine layers know the time.

    f(x, t) = FFN_t(a x + attention(x)),   every affine layer of FFN_t being A x + b + c t

Attention does not depend on time, and there is neither norm nor dropout. Which times it is asked
at, and how many such velocities follow each other, is not known here.
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


class TimedVelocity(nn.Module):
    """One block; `inner_skip` is whether a = 1 rather than 0."""

    timed = True

    def __init__(
        self, width: int, heads: int, hidden: int, inner_skip: bool, causal: bool = False
    ) -> None:
        super().__init__()
        self.inner_skip = inner_skip
        self.attention = Attention(width, heads, causal)
        self.up, self.down = TimedLinear(width, hidden), TimedLinear(hidden, width)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        *context, t, _ = rest  # the velocity does not depend on the size of the step
        y = self.attention(x, *context)  # (B, N, D)
        y = x + y if self.inner_skip else y
        out: Tensor = self.down(F.relu(self.up(y, t)), t)
        return out
