"""Self-attention as one node while a model is traced: the mark of where its form is filled in.

So a velocity is traced once for all forms, and quickly. Knows the attention of `train`; not what
becomes of the mark.
"""

import copy

import torch
from torch import Tensor, nn

from train.blocks import Attention

DOMAIN, NAME = "stepdial", "Attention"


class MarkedAttention(nn.Module):
    """An attention whose heart is one node of a graph, which torch cannot run."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attention = self.attention
        qkv = attention.qkv(x)  # (B, N, 3 H d)
        y = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{NAME}",
            [qkv] if mask is None else [qkv, mask],
            attrs={
                "heads": attention.heads,
                "head_width": attention.head_width,
                "causal": int(attention.causal),
            },
            dtype=torch.float32,
            shape=(*x.shape[:2], attention.heads * attention.head_width),
            version=1,
        )
        out: Tensor = attention.out(y)  # (B, N, D)
        return out


def marked(module: nn.Module) -> nn.Module:
    """A copy with every self-attention as one node; it shares the weights."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return _mark(copy.deepcopy(module, shared))


def _mark(module: nn.Module) -> nn.Module:
    if isinstance(module, Attention):
        return MarkedAttention(module)
    for name, child in module.named_children():
        setattr(module, name, _mark(child))
    return module
