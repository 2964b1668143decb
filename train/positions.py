"""Where a position is: learned vectors, or fixed sines and cosines.

Knows nothing of what stands at the positions.
"""

import math

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    """Vectors (N, D) for the first positions of a window."""

    def __init__(self, window: int, width: int, kind: str = "learned") -> None:
        super().__init__()
        self.window = window
        if kind == "learned":
            self.weight: Tensor = nn.Parameter(torch.empty(window, width).normal_(0.0, 0.02))
        else:
            self.register_buffer("weight", sinusoids(window, width), persistent=False)

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]

    def at(self, index: Tensor) -> Tensor:
        """The vectors at these positions, of any shape."""
        return self.weight[index]


def sinusoids(window: int, width: int) -> Tensor:
    """sin and cos of position / 10000^(2i/D), interleaved."""
    at = torch.arange(window)[:, None]
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    table = torch.zeros(window, width)
    table[:, 0::2] = torch.sin(at * rate)
    table[:, 1::2] = torch.cos(at * rate)[:, : width // 2]
    return table
