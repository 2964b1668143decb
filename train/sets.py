"""Set Transformers: induced attention blocks over a set, and a head that pools by attention.

As in the released Set Transformer: the skip of a block starts from the projected query, and the
feed-forward is one layer. Nothing here depends on the order of the points or on their number.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import Norm
from train.travel import Embedded


class MultiheadBlock(nn.Module):
    """Attention from queries to other vectors, then one layer, each with a skip (MAB)."""

    def __init__(
        self, query_width: int, other_width: int, width: int, heads: int, norm: Norm
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.norm = heads, norm
        self.query = nn.Linear(query_width, width)
        self.key = nn.Linear(other_width, width)
        self.value = nn.Linear(other_width, width)
        self.up = nn.Linear(width, width)
        # "pre" normalises what enters attention and the layer, "post" what leaves them.
        before = norm == "pre"
        self.norm_query = nn.LayerNorm(query_width) if before else nn.Identity()
        self.norm_other = nn.LayerNorm(other_width) if before else nn.Identity()
        self.norm1 = nn.Identity() if norm == "none" else nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width) if norm == "post" else nn.Identity()

    def forward(self, queries: Tensor, others: Tensor) -> Tensor:
        B, N, _ = queries.shape
        q = self.query(self.norm_query(queries))  # (B, N, D)
        others = self.norm_other(others)
        y: Tensor = F.scaled_dot_product_attention(
            self._split(q),
            self._split(self.key(others)),
            self._split(self.value(others)),
            scale=q.shape[-1] ** -0.5,
        )
        y = q + y.transpose(1, 2).reshape(B, N, -1)  # (B, N, D)
        if self.norm == "pre":
            y = y + F.relu(self.up(self.norm1(y)))
        else:
            y = self.norm1(y)
            y = self.norm2(y + F.relu(self.up(y)))
        return y

    def _split(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        return x.view(B, N, self.heads, D // self.heads).transpose(1, 2)  # (B, H, N, D/H)


class InducedBlock(nn.Module):
    """Learned points attend to the set, and the set to them: linear in its size (ISAB)."""

    def __init__(self, from_width: int, width: int, heads: int, inducing: int, norm: Norm) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(1, inducing, width))
        nn.init.xavier_uniform_(self.points)
        self.gather = MultiheadBlock(width, from_width, width, heads, norm)
        self.spread = MultiheadBlock(from_width, width, width, heads, norm)

    def forward(self, x: Tensor) -> Tensor:
        gathered = self.gather(self.points.expand(x.shape[0], -1, -1), x)  # (B, M, D)
        out: Tensor = self.spread(x, gathered)  # (B, N, D)
        return out


class SetVelocity(nn.Module):
    """f = [norm o] f_L o ... o f_1 of induced blocks, with one set of weights for every step."""

    def __init__(
        self, layers: int, width: int, heads: int, inducing: int, norm: Norm, final_norm: bool
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            InducedBlock(width, width, heads, inducing, norm) for _ in range(layers)
        )
        self.norm: nn.Module = nn.LayerNorm(width) if final_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x


class PointEmbedding(nn.Module):
    """The input projection that brings points to the width in which an ODE can move them."""

    def __init__(self, dimensions: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(dimensions, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, points: Tensor) -> Embedded:
        return Embedded(self.drop(self.linear(points)))  # (B, N, D)


class InducedEmbedding(nn.Module):
    """The first block of a discrete Set Transformer, which needs no projection before it."""

    def __init__(self, dimensions: int, width: int, heads: int, inducing: int, norm: Norm) -> None:
        super().__init__()
        self.block = InducedBlock(dimensions, width, heads, inducing, norm)

    def forward(self, points: Tensor) -> Embedded:
        return Embedded(self.block(points))  # (B, N, D)


class PooledByAttention(nn.Module):
    """Class logits from one learned query that attends to the whole set (PMA)."""

    def __init__(
        self, width: int, heads: int, classes: int, norm: Norm, final_norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width) if final_norm else nn.Identity()
        self.seed = nn.Parameter(torch.empty(1, 1, width))
        nn.init.xavier_uniform_(self.seed)
        self.pool = MultiheadBlock(width, width, width, heads, norm)
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x))
        pooled = self.pool(self.seed.expand(x.shape[0], -1, -1), x)[:, 0]  # (B, D)
        logits: Tensor = self.linear(self.drop(pooled))  # (B, classes)
        return logits
