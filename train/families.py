"""The blocks of other papers: TransEvolve, Runge-Kutta blocks, and blocks for sets."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import Block, FeedForward, Norm, RandomFeedForward
from train.ode import METHODS, Embedded
from train.recipe import Function, Scheme


class Origin(NamedTuple):
    """What the input of a block fixes for all its depths."""

    logits: Tensor  # (B, H, N, M): products of queries and keys, less where there is no attention
    columns: Tensor  # (B, H, M, T/H): what time adds to each column


class EvolvingLogits(nn.Module):
    """Attention logits between two inputs as a function of depth, but for what rows share."""

    waves: Tensor

    def __init__(
        self, width: int, heads: int, depth: int, time_width: int = 0, dropout: float = 0.0
    ) -> None:
        """`time_width` is of each head; 0 makes it as wide as the head."""
        super().__init__()
        times = heads * (time_width or width // heads)
        if width % heads or times % 2:
            raise ValueError(
                f"width {width} must be a multiple of heads {heads}, and heads * time_width even"
            )
        self.width, self.heads = width, heads
        self.query = nn.Linear(width + times, width + times, bias=False)
        self.key = nn.Linear(width + times, width + times, bias=False)
        limit = math.sqrt(6 / times)
        self.wave_scales = nn.ParameterList(
            torch.empty(times).uniform_(-limit, limit) for _ in range(depth)
        )
        angles = torch.arange(1, depth + 1)[:, None] * torch.arange(times // 2) * (math.pi / 64)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (depth, times)
        self.register_buffer("waves", waves, persistent=False)
        self.drop = nn.Dropout(dropout)  # of queries and keys

    def begin(self, x: Tensor, y: Tensor, allowed: Tensor | None) -> Origin:
        """From inputs x (B, N, D) and y (B, M, D), with attention where it is allowed."""
        query = self.drop(x @ self.query.weight[:, : self.width].mT)  # (B, N, D + T)
        key = self.drop(y @ self.key.weight[:, : self.width].mT)  # (B, M, D + T)
        queries, keys = _heads(query, self.heads), _heads(key, self.heads)  # (B, H, N or M, E)
        logits = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        if allowed is not None:
            # Finite, so that a row which may attend to nothing gives no NaN.
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min / 2)
        columns = _heads(key @ self.query.weight[:, self.width :], self.heads)  # (B, H, M, T/H)
        return Origin(logits, columns)

    def evolve(self, origin: Origin, layer: int) -> Tensor:
        """The logits (B, H, N, M) at a layer, from 0."""
        time = (self.wave_scales[layer] * self.waves[layer]).view(self.heads, -1, 1)  # (H, T/H, 1)
        column: Tensor = origin.columns @ time  # (B, H, M, 1)
        return origin.logits + column.transpose(-1, -2)


def _heads(x: Tensor, heads: int) -> Tensor:
    """The channels of x (B, N, D), by head."""
    B, N, D = x.shape
    return x.view(B, N, heads, D // heads).transpose(1, 2)  # (B, H, N, D/H)


class EvolvedAttention(nn.Module):
    """The norm of what is attended to, mixed by given logits; no value projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        values = _heads(self.norm(y), self.heads)  # (B, H, M, D/H)
        mixed = logits.softmax(-1) @ values  # (B, H, N, D/H)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))  # (B, N, D)
        return out


class EvolvedLayer(nn.Module):
    """One depth of a block: attention, attention to the memory, feed-forward, each with a skip."""

    def __init__(
        self, width: int, heads: int, feedforward: nn.Module, memory: bool, dropout: float
    ) -> None:
        super().__init__()
        self.attention = EvolvedAttention(width, heads)
        self.cross_attention = EvolvedAttention(width, heads) if memory else None
        self.norm, self.feedforward = nn.LayerNorm(width), feedforward
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, logits: Tensor, across: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        x = x + self.drop(self.attention(logits, x))
        if self.cross_attention is not None:
            x = x + self.drop(self.cross_attention(across, memory))
        x = x + self.drop(self.feedforward(self.norm(x)))
        return x


class EvolvedBlock(nn.Module):
    """Layers of their own weights under one evolving attention, and a norm at the end."""

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        hidden: int,
        feedforward: Literal["full", "random"] = "full",
        causal: bool = False,
        memory: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal

        def new_logits() -> EvolvingLogits:
            return EvolvingLogits(width, heads, depth, dropout=attention_dropout)

        self.logits = new_logits()
        self.across = new_logits() if memory else None
        self.layers = nn.ModuleList(
            EvolvedLayer(
                width,
                heads,
                FeedForward(width, hidden, "relu")
                if feedforward == "full"
                else RandomFeedForward(width, hidden, layer + 1),
                memory,
                dropout,
            )
            for layer in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        if self.across is None:
            own = self.logits.begin(x, x, self._allowed(x, *context))
            for i, layer in enumerate(self.layers):
                x = layer(x, self.logits.evolve(own, i))
        else:
            memory, *masks = context
            own = self.logits.begin(x, x, self._allowed(x))
            across = self.across.begin(x, memory, masks[0][:, None, None, :] if masks else None)
            for i, layer in enumerate(self.layers):
                logits = self.logits.evolve(own, i), self.across.evolve(across, i)
                x = layer(x, *logits, memory)
        out: Tensor = self.norm(x)
        return out

    def _allowed(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Where self-attention may look: (1 or B, 1, 1 or N, N)."""
        present = None if mask is None else mask[:, None, None, :]
        if not self.causal:
            return present
        N = x.shape[1]
        past = torch.ones(1, 1, N, N, dtype=torch.bool, device=x.device).tril()
        return past if present is None else past & present


class EvolvedStack(nn.Module):
    """Blocks one after another, each with an attention of its own."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *context)
        return x


# Stacks of blocks whose functions are combined as a solver combines the stages of its steps. A
# function F maps (B, N, D) to (B, N, D) without a skip around it; the scheme says how a stack
# goes from y to y'. Every block has weights of its own, and one set of them for all its stages.
# residual y' = y + F(y) rk2 y' = y + 1/2 F1 + 1/2 F2, F1 = F(y), F2 = F(y + F1) rk2-gamma1 y' = y
# + F1 + F2 rk2-learned y' = y + g1 F1 + g2 F2, g1, g2 learned for each block rk4 y' = y + 1/6 (F1
# + 2 F2 + 2 F3 + F4), the classic fourth-order method polynet y' = y + F(y) + F(F(y)) leapfrog y'
# = y_before + 2 F(y) multistep y' = k y + (1 - k) y_before + F(y), k learned for each block dlcl
# y' = y_0 + sum of w_l F(y_l) so far, w learned for each block and l What is learned starts where
# the scheme is the plain sum of all F.


HALVES: tuple[Literal["attention", "feedforward"], ...] = ("attention", "feedforward")
TABLEAUX = {
    "residual": METHODS["euler"],
    "rk2": METHODS["heun"],
    "rk2-gamma1": METHODS["heun"],
    "rk2-learned": METHODS["heun"],
    "rk4": METHODS["rk4"],
}


class BlockFunction(nn.Module):
    """F(y) = block(y) - y: attention and feed-forward merged into one function.

    The feed-forward reads y plus what attention made of it, so that y + F(y) is the block itself.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, y: Tensor, *context: Tensor) -> Tensor:
        out: Tensor = self.block(y, *context) - y
        return out


class HalfFunction(nn.Module):
    """F of one half of a block alone: of its attention, or of its feed-forward, less y."""

    def __init__(self, block: Block, half: Literal["attention", "feedforward"]) -> None:
        super().__init__()
        self.block, self.of = block, half

    def forward(self, y: Tensor, *context: Tensor) -> Tensor:
        if self.of == "attention":
            return self.block.attend(y, *context) - y
        return self.block.feed(y) - y


def halves(blocks: Iterable[Block], which: Function, scheme: Scheme) -> "RungeKuttaStack":
    """Both halves of each block as functions of their own; only `which` of them under the scheme.

    Figure 4 of the paper: F as attention, as feed-forward, or as each of the two ("halves").
    """
    functions: list[nn.Module] = []
    plain = set()
    for block in blocks:
        for half in HALVES:
            if which not in (half, "halves"):
                plain.add(len(functions))
            functions.append(HalfFunction(block, half))
    return RungeKuttaStack(functions, scheme, frozenset(plain))


class RungeKuttaStack(nn.Module):
    """Functions one after another under one scheme; those numbered `plain` are y + F(y)."""

    def __init__(
        self,
        functions: Iterable[nn.Module],
        scheme: Scheme,
        plain: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        if scheme not in get_args(Scheme):
            raise ValueError(
                f"unknown scheme {scheme!r}; choose one of {', '.join(get_args(Scheme))}"
            )
        if plain and scheme not in TABLEAUX:
            raise ValueError(
                f"scheme {scheme} looks back on what came before: it is of whole blocks"
            )
        self.functions, self.scheme, self.plain = nn.ModuleList(functions), scheme, plain
        self.weights = nn.ParameterList(
            torch.ones(count) for count in _learned(scheme, len(self.functions) - len(plain))
        )

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        states, changes = [x], list[Tensor]()
        learned = iter(self.weights)
        for i, function in enumerate(self.functions):
            y = states[-1]
            if i in self.plain:
                y = y + function(y, *context)
            elif self.scheme in TABLEAUX:
                weights = next(learned) if self.scheme == "rk2-learned" else None
                y = self._runge_kutta(function, y, weights, context)
            else:
                changes.append(function(y, *context))
                y = self._combine(i, states, changes, context)
            states.append(y)
        return states[-1]

    def _runge_kutta(
        self, function: nn.Module, y: Tensor, weights: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        table = TABLEAUX[self.scheme]
        stages: list[Tensor] = []
        for row in table.a:
            stages.append(function(_add(y, row, stages), *context))
        if weights is not None:
            return _add(y, weights.unbind(), stages)
        return _add(y, (1.0, 1.0) if self.scheme == "rk2-gamma1" else table.b, stages)

    def _combine(
        self, i: int, states: list[Tensor], changes: list[Tensor], context: tuple[Tensor, ...]
    ) -> Tensor:
        """The next state from those before it and the change F(y) at each of them."""
        y, change = states[-1], changes[-1]
        before = states[-2] if i else y
        if self.scheme == "polynet":
            out: Tensor = y + change + self.functions[i](change, *context)
            return out
        if self.scheme == "leapfrog":
            return before + 2 * change if i else y + change
        if self.scheme == "multistep":
            k: Tensor = self.weights[i]
            return before + k * (y - before) + change
        return _add(states[0], self.weights[i].unbind(), changes)


def _learned(scheme: Scheme, blocks: int) -> list[int]:
    """How many weights each block learns."""
    if scheme == "dlcl":
        return [i + 1 for i in range(blocks)]
    return {"rk2-learned": [2] * blocks, "multistep": [1] * blocks}.get(scheme, [])


def _add(y: Tensor, weights: Sequence[float | Tensor], stages: list[Tensor]) -> Tensor:
    for weight, stage in zip(weights, stages, strict=True):
        if isinstance(weight, Tensor) or weight:
            y = y + weight * stage
    return y


# Set Transformers: induced attention blocks over a set, and a head that pools by attention. As in
# the released Set Transformer: the skip of a block starts from the projected query, and the
# feed-forward is one layer. Nothing here depends on the order of the points or on their number.


class MultiheadBlock(nn.Module):
    """Attention from queries to other vectors, then one layer, each with a skip (MAB).

    Without `outer_skip` the layer has none.
    """

    def __init__(
        self,
        query_width: int,
        other_width: int,
        width: int,
        heads: int,
        norm: Norm,
        outer_skip: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads, self.norm, self.outer_skip = heads, norm, outer_skip
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
            _heads(q, self.heads),
            _heads(self.key(others), self.heads),
            _heads(self.value(others), self.heads),
            scale=q.shape[-1] ** -0.5,
        )
        y = q + y.transpose(1, 2).reshape(B, N, -1)  # (B, N, D)
        seen = self.norm1(y)
        y = y if self.norm == "pre" else seen
        changed = F.relu(self.up(seen))
        out: Tensor = self.norm2(y + changed if self.outer_skip else changed)
        return out


class InducedBlock(nn.Module):
    """Learned points attend to the set, and the set to them: linear in its size (ISAB)."""

    def __init__(
        self,
        from_width: int,
        width: int,
        heads: int,
        inducing: int,
        norm: Norm,
        outer_skip: bool = True,
    ) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(1, inducing, width))
        nn.init.xavier_uniform_(self.points)
        self.gather = MultiheadBlock(width, from_width, width, heads, norm, outer_skip)
        self.spread = MultiheadBlock(from_width, width, width, heads, norm, outer_skip)

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
