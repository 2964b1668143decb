"""The reference decoder in eager PyTorch with caches, as one would write it by hand.

Keys and values of every step and layer lie in tensors that are allocated once and written in
place; all rows are equally long. It deliberately uses nothing of ours but the trained modules.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from train.blocks import Block, BlockVelocity
from train.model import Embedding, OTTransformer, Stepped


class TorchDecoder:
    """So many Euler steps of rows that decode together."""

    def __init__(self, model: Stepped, steps: int, rows: int, positions: int) -> None:
        assert isinstance(model, OTTransformer)
        assert isinstance(model.embed, Embedding) and isinstance(model.velocity, BlockVelocity)
        self.embed, self.head, self.norm = model.embed, model.head, model.velocity.norm
        self.blocks = [cast(Block, block) for block in model.velocity.blocks]
        self.steps, self.h = steps, model.T / steps
        attention = self.blocks[0].attention
        size = (steps, len(self.blocks), rows, attention.heads, positions, attention.head_width)
        self.keys, self.values = torch.randn(size), torch.randn(size)

    @torch.inference_mode()
    def token(self, tokens: Tensor, past: int) -> Tensor:
        """Logits (B, V) after one token a row (B,), behind so many positions."""
        x = self.embed.tokens(tokens[:, None]) * self.embed.scale  # (B, 1, D)
        x = x + self.embed.positions(past + 1)[past]
        for step in range(self.steps):
            v = x
            for layer, block in enumerate(self.blocks):
                v = v + self._attend(block, block.norm1(v), step, layer, past)
                if block.feedforward is not None:
                    v = v + block.feedforward(block.norm2(v))
            x = x + self.h * self.norm(v)
        logits: Tensor = self.head(x)[:, 0]
        return logits

    def _attend(self, block: Block, x: Tensor, step: int, layer: int, past: int) -> Tensor:
        attention = block.attention
        parts = attention.qkv(x).view(len(x), 1, 3, attention.heads, attention.head_width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # (B, H, 1, D/H) each
        keys, values = self.keys[step, layer], self.values[step, layer]  # (B, H, N, D/H)
        keys[:, :, past : past + 1], values[:, :, past : past + 1] = k, v
        y = F.scaled_dot_product_attention(q, keys[:, :, : past + 1], values[:, :, : past + 1])
        out: Tensor = attention.out(y.transpose(1, 2).flatten(2))  # (B, 1, D)
        return out
