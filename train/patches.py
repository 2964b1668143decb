"""Images as sequences: square patches through one linear layer, as in the Vision Transformer.

Knows pixels that are already normalised, not where they come from.
"""

import torch
from torch import Tensor, nn

from train.positions import Positions
from train.travel import Embedded


class PatchEmbedding(nn.Module):
    """A token a patch, in reading order, after a learned first token if `first`."""

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        patch: int,
        model_width: int,
        first: bool,
        dropout: float = 0.0,
        positions: str = "learned",
    ) -> None:
        super().__init__()
        if height % patch or width % patch:
            raise ValueError(
                f"patches of {patch} x {patch} do not fill an image of {height} x {width} pixels: "
                "set model.patch to a divisor of both"
            )
        self.patch = patch
        patches = (height // patch) * (width // patch)
        self.linear = nn.Linear(channels * patch * patch, model_width)
        self.first = nn.Parameter(torch.randn(1, 1, model_width)) if first else None
        self.positions = Positions(patches + first, model_width, positions)
        if positions == "learned":
            nn.init.normal_(self.positions.weight)  # as large as the patches, as in the papers' ViT
        self.drop = nn.Dropout(dropout)

    def forward(self, pixels: Tensor) -> Embedded:
        B, C, H, W = pixels.shape
        p = self.patch
        cut = pixels.view(B, C, H // p, p, W // p, p)
        cut = cut.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * p * p)  # (B, N, C*p*p)
        x = self.linear(cut)  # (B, N, D)
        if self.first is not None:
            x = torch.cat([self.first.expand(B, -1, -1), x], dim=1)  # (B, 1 + N, D)
        x = x + self.positions(x.shape[1])
        return Embedded(self.drop(x))
