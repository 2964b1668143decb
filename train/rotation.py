"""Feed-forward layers whose matrices are fixed random rotations around a learned diagonal.

W = U S V: the entries of U and V are sines and cosines of random angles that grow with the depth,
chosen once and kept with the weights; S and the biases are learned, which is O(width) parameters.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RandomLinear(nn.Module):
    """x -> x U S V + b, at one depth of a block."""

    left: Tensor
    right: Tensor

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        rank = min(inputs, outputs)  # S is rectangular: beyond this it is zero
        self.register_buffer("left", rotation(inputs, depth)[:, :rank].clone())  # (I, R)
        self.register_buffer("right", rotation(outputs, depth)[:rank].clone())  # (R, O)
        self.diagonal = nn.Parameter(torch.empty(rank))
        nn.init.uniform_(self.diagonal, -math.sqrt(6 / rank), math.sqrt(6 / rank))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.left * self.diagonal) @ self.right  # (I, O)
        return x @ weight + self.bias


class RandomFeedForward(nn.Module):
    """Two random linear layers around a ReLU."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.up, self.down = RandomLinear(width, hidden, depth), RandomLinear(hidden, width, depth)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


def rotation(width: int, depth: int) -> Tensor:
    """A (width, width) matrix that is nearly orthogonal, from torch's generator; depth from 1."""
    coefficients = torch.randn(width, width // 2) * width
    angles = depth * math.pi / width * torch.arange(width // 2) * coefficients
    return torch.cat([angles.sin(), angles.cos()], dim=1) / math.sqrt(width)
