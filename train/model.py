"""OT-Transformers: embed, integrate a velocity over [0, T], read out.

The plug-and-play form is `OTTransformer(embed, velocity, head)`: any module that maps (B, N, D) to
(B, N, D) can be the velocity. With `depth="discrete"` the same parts make the ordinary transformer
x -> head(velocity(x)), the baseline.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.blocks import (
    Activation,
    Attention,
    Block,
    BlockVelocity,
    Conditioned,
    FeedForward,
    Loop,
    Norm,
    RelativeAttention,
    TimedVelocity,
    initialise,
    initialise_glorot,
)
from train.data.batch import Sizes
from train.families import (
    BlockFunction,
    EvolvedBlock,
    EvolvedStack,
    InducedBlock,
    InducedEmbedding,
    PointEmbedding,
    PooledByAttention,
    RungeKuttaStack,
    SetVelocity,
    halves,
)
from train.ode import Depth, Embedded, Observer, Solution, Trajectory, solve
from train.recipe import ModelConfig, StepsConfig

# Where a position is: learned vectors, or fixed sines and cosines.


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


Dial = Literal["resolution", "time"]
INJECTED = 0.1  # first gain of an injection: a larger one drowns what the blocks write, for long


class Output(NamedTuple):
    logits: Tensor
    cost: Tensor  # (): the transport cost of all trajectories
    evaluations: int  # of velocities
    trajectories: tuple[Trajectory, ...]  # the one that is read out is the last
    context: tuple[Tensor, ...] = ()  # what the head sees beside the state
    early: tuple[Tensor, ...] = ()  # the logits after the counts asked for, in their order


class Embedding(nn.Module):
    """Token plus position embeddings; a pad id makes a mask of the positions that exist.

    Positions are "learned", "sinusoidal" or "none", for blocks that know them by themselves.
    """

    def __init__(
        self,
        vocabulary: int,
        window: int,
        width: int,
        pad_id: int | None,
        dropout: float = 0.0,
        positions: str = "learned",
    ) -> None:
        super().__init__()
        self.window, self.pad_id = window, pad_id
        self.scale = width**0.5 if positions == "sinusoidal" else 1.0  # else the sines drown tokens
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = None if positions == "none" else Positions(window, width, positions)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Embedded:
        x = self.tokens(tokens) * self.scale  # (B, N, D)
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1])
        if self.pad_id is None:
            return Embedded(self.drop(x))
        mask = tokens != self.pad_id  # (B, N)
        return Embedded(self.drop(x), (mask,), mask)


class TokenHead(nn.Module):
    """Logits at every position: of the next token, or of a label."""

    def __init__(self, width: int, vocabulary: int, norm: bool, bias: bool = True) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width, bias=bias) if norm else nn.Identity()
        self.linear = nn.Linear(width, vocabulary, bias=bias)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))  # (B, N, V)
        return logits


class PooledHead(nn.Module):
    """Class logits from the mean, the maximum or the first of the positions that exist.

    With `norm` every position is normalised before, with `norm_pooled` what was pooled is. There
    may be layers as wide as the model, each with a ReLU, before the one that reads out.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        norm: bool,
        pool: str,
        dropout: float,
        norm_pooled: bool = False,
        layers: int = 0,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.norm_pooled: nn.Module = nn.LayerNorm(width) if norm_pooled else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.read(self.pooled(x, mask))

    def pooled(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One vector (B, D) of all positions: the embedding of the input."""
        x = self.norm(x)
        if self.pool == "first":
            pooled = x[:, 0]
        elif mask is None:
            pooled = x.amax(1) if self.pool == "max" else x.mean(1)
        else:
            present = mask[..., None].type_as(x)
            if self.pool == "max":
                pooled = (x * present + (present - 1) * 1e4).amax(1)
            else:
                pooled = (x * present).sum(1) / present.sum(1)
        normed: Tensor = self.norm_pooled(pooled)
        return normed

    def read(self, pooled: Tensor) -> Tensor:
        """The logits of a pooled state."""
        for layer in self.layers:
            pooled = layer(pooled).relu()
        logits: Tensor = self.linear(self.drop(pooled))  # (B, classes)
        return logits


class Prelude(nn.Module):
    """An embedding, blocks of its own behind it, and what of it is injected into the loop.

    The injection is W norm(x0), the first of the context. It is the same at every evaluation, so
    it is computed once.
    """

    def __init__(
        self, embed: nn.Module, blocks: Iterable[nn.Module], width: int, inject: bool
    ) -> None:
        super().__init__()
        self.embed, self.blocks, self.inject = embed, nn.ModuleList(blocks), inject
        if inject:
            self.norm = nn.LayerNorm(width)
            nn.init.constant_(self.norm.weight, INJECTED)
            self.project = nn.Linear(width, width, bias=False)

    def forward(self, *inputs: Tensor) -> Embedded:
        x, context, present = as_embedded(self.embed(*inputs))
        for block in self.blocks:
            x = block(x, *context)
        if self.inject:
            context = (self.injected(x), *context)
        return Embedded(x, context, present)

    def injected(self, x: Tensor) -> Tensor:
        """What every evaluation sees of an embedded input (B, N, D)."""
        injection: Tensor = self.project(self.norm(x))
        return injection


class Coda(nn.Module):
    """Blocks of its own behind the loop, and the head; neither sees what was injected."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Module, injected: bool) -> None:
        super().__init__()
        self.blocks, self.head, self.injected = nn.ModuleList(blocks), head, injected

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x, context = self.behind(x, *context)
        logits: Tensor = self.head(x, *context)
        return logits

    def pooled(self, x: Tensor, *context: Tensor) -> Tensor:
        """The state that the head pools, where it pools one."""
        x, context = self.behind(x, *context)
        pooled: Tensor = cast(Any, self.head).pooled(x, *context)
        return pooled

    def read(self, pooled: Tensor) -> Tensor:
        """The logits of a pooled state."""
        logits: Tensor = cast(Any, self.head).read(pooled)
        return logits

    def behind(self, x: Tensor, *context: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The state behind the blocks, and what the head sees beside it."""
        context = context[1:] if self.injected else context
        for block in self.blocks:
            x = block(x, *context)
        return x, context


class Stepped(nn.Module):
    """A model that is asked for a number of steps: model(*inputs, steps=4) -> Output."""

    head: nn.Module

    def __init__(self, T: float, depth: Depth) -> None:
        super().__init__()
        self.T, self.depth = T, depth
        self.checkpoint = False  # recompute each step going backward
        self.tolerance: float | None = None  # of a solver that picks its own steps
        self.dial: Dial = "resolution"
        self.full = 1  # the count that [0, T] is crossed in
        self.backprop = 0  # steps that gradients go back through; 0: all

    @property
    def discrete(self) -> bool:
        """Whether its depth is fixed: every number of steps is the same."""
        return self.depth == "discrete"

    def span(self, steps: int) -> tuple[float, float]:
        """The size of a step, and the time at which so many steps end.

        With the dial of resolution any number of steps crosses [0, T]. With that of time a step is
        always T / full, and more steps than `full` go on beyond T.
        """
        if self.dial == "resolution":
            return self.T / steps, self.T
        return self.T / self.full, self.T * steps / self.full

    @property
    def saving(self) -> bool:
        return self.checkpoint and torch.is_grad_enabled()


class OTTransformer(Stepped):
    """embed -> x' = velocity(x) over [0, T] -> head."""

    def __init__(
        self,
        embed: nn.Module,
        velocity: nn.Module,
        head: nn.Module,
        T: float = 1.0,
        depth: Depth = "ode",
    ) -> None:
        super().__init__(T, depth)
        self.embed, self.velocity, self.head = embed, velocity, head

    def forward(
        self,
        *inputs: Tensor,
        steps: int = 1,
        method: str = "euler",
        observe: Observer | None = None,
        exits: tuple[int, ...] = (),
    ) -> Output:
        """The answer after `steps`, and on the way there after each of `exits`, ascending."""
        start = as_embedded(self.embed(*inputs))
        state, cost, evaluations, trajectories, passed = solve(
            self.velocity,
            start,
            self.depth,
            steps,
            method,
            self.span(steps)[1],
            observe,
            self.saving,
            self.tolerance,
            exits,
            self.backprop,
        )
        early = tuple(self.head(each, *start.context) for each in passed)
        logits = self.head(state, *start.context)
        return Output(logits, cost, evaluations, trajectories, start.context, early)


def pools(head: nn.Module) -> bool:
    """Whether a head reads its answer from one pooled state, which `pooled` and `read` give."""
    return hasattr(head.head if isinstance(head, Coda) else head, "pooled")


def as_embedded(made: Tensor | Embedded) -> Embedded:
    """What an embedding gave: a plain module gives the state alone."""
    return made if isinstance(made, Embedded) else Embedded(made)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Images as sequences: square patches through one linear layer, as in the Vision Transformer.


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


# Blocks that also attend to a memory: the decoder's half of a translator. A block is called
# block(x, memory, memory_mask) and maps (B, N, D) to (B, N, D).


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


# Translators: an encoder reads the source, a decoder that attends to it writes the target. Both
# cross the same kind of depth, an ODE each unless depth is discrete, with the same number of
# steps. The search for an answer is in train.search.


class Translator(Stepped):
    """embed -> encoder -> memory; embed -> decoder, which sees the memory -> head."""

    def __init__(
        self,
        source_embedding: Embedding,
        encoder_velocity: nn.Module,
        encoder_norm: nn.Module,
        target_embedding: Embedding,
        decoder_velocity: nn.Module,
        head: nn.Module,
        T: float = 1.0,
        depth: Depth = "ode",
    ) -> None:
        super().__init__(T, depth)
        if source_embedding.pad_id is None:
            raise ValueError("a translator's source needs a pad id: it tells where memory is")
        self.pad_id = source_embedding.pad_id
        self.embed_source, self.embed_target = source_embedding, target_embedding
        self.encoder, self.decoder = encoder_velocity, decoder_velocity
        self.norm, self.head = encoder_norm, head

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        steps: int = 1,
        method: str = "euler",
        observe: Observer | None = None,
    ) -> Output:
        """Logits (B, N, V) of the token after each of the target (B, N), given the source (B, S).

        An observer sees the steps of the encoder, then those of the decoder.
        """
        read = self._read(source, steps, method, observe)
        memory, mask = self.norm(read.state), self.mask_of(source)
        written = self._write(memory, mask, target, steps, method, observe)
        return Output(
            self.head(written.state),
            read.cost + written.cost,
            read.evaluations + written.evaluations,
            read.trajectories + written.trajectories,
        )

    def encode(self, source: Tensor, steps: int = 1, method: str = "euler") -> Tensor:
        """The memory (B, S, D) of a source (B, S)."""
        memory: Tensor = self.norm(self._read(source, steps, method).state)
        return memory

    def decode(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int = 1,
        method: str = "euler",
        keep: Tensor | None = None,
    ) -> Tensor:
        """Logits after each token of the target (B, N), or after those at `keep` (K,) only."""
        x = self._write(memory, source_mask, target, steps, method).state
        if keep is not None:
            x = x[:, keep]  # (B, K, D)
        logits: Tensor = self.head(x)
        return logits

    def mask_of(self, source: Tensor) -> Tensor:
        """Where a source (B, S) has tokens."""
        return source.ne(self.pad_id)

    def _read(
        self, source: Tensor, steps: int, method: str, observe: Observer | None = None
    ) -> Solution:
        start = self.embed_source(source)
        return self._solve(self.encoder, start, steps, method, observe)

    def _write(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int,
        method: str,
        observe: Observer | None = None,
    ) -> Solution:
        # Attention to the target is causal and padding is on the right, so it needs no mask there.
        state, _, present = self.embed_target(target)
        start = Embedded(state, (memory, source_mask), present)
        return self._solve(self.decoder, start, steps, method, observe)

    def _solve(
        self,
        velocity: nn.Module,
        start: Embedded,
        steps: int,
        method: str,
        observe: Observer | None,
    ) -> Solution:
        return solve(
            velocity,
            start,
            self.depth,
            steps,
            method,
            self.span(steps)[1],
            observe,
            self.saving,
            self.tolerance,
            backprop=self.backprop,
        )


# The model that a recipe describes, for data of given sizes.


PAD_ID = 0


def build_model(config: ModelConfig, sizes: Sizes, steps: StepsConfig | None = None) -> Stepped:
    """Fresh weights: the same for the same seed of torch."""
    model = _FAMILIES[config.family](config, sizes)
    if config.initial == "glorot":
        initialise_glorot(model)
    elif config.initial != "torch":
        depth = config.prelude + config.layers + config.coda
        initialise(model, depth, config.initial == "scaled")
    if steps is not None:
        model.dial, model.full = steps.dial, steps.full
    return model


def _looped(
    c: ModelConfig, embed: nn.Module, velocity: nn.Module, head: nn.Module, causal: bool = False
) -> Stepped:
    """One trajectory, with blocks before and after it and its input injected where asked for."""
    if c.prelude or c.inject:
        embed = Prelude(embed, _blocks(c, causal, False, c.prelude), c.width, c.inject)
    if c.coda or c.inject:
        head = Coda(_blocks(c, causal, False, c.coda), head, c.inject)
    return OTTransformer(embed, velocity, head, c.T, c.depth)


def _decoder(c: ModelConfig, sizes: Sizes) -> Stepped:
    if sizes.classes:
        raise ValueError("a decoder predicts tokens, but the data has classes")
    embed = Embedding(sizes.vocabulary, c.window, c.width, None, c.embed_dropout, c.positions)
    head = TokenHead(c.width, sizes.vocabulary, c.final_norm == "outside", c.bias and not c.tied)
    if c.tied:
        head.linear.weight = embed.tokens.weight
    return _looped(c, embed, velocity_for(c, causal=True), head, causal=True)


def _encoder(c: ModelConfig, sizes: Sizes) -> Stepped:
    if not sizes.classes:
        raise ValueError("an encoder predicts classes, but the data has none")
    embed = Embedding(
        sizes.vocabulary, c.window, c.width, sizes.pad_id, c.embed_dropout, c.positions
    )
    return _looped(c, embed, velocity_for(c), _pooled(c, sizes))


def _tagger(c: ModelConfig, sizes: Sizes) -> Stepped:
    if not sizes.classes:
        raise ValueError("a tagger predicts a label a position, but the data has none")
    embed = Embedding(sizes.vocabulary, c.window, c.width, PAD_ID, c.embed_dropout, c.positions)
    head = TokenHead(c.width, sizes.classes, c.final_norm == "outside")
    return _looped(c, embed, velocity_for(c), head)


def _image(c: ModelConfig, sizes: Sizes) -> Stepped:
    embed = PatchEmbedding(
        sizes.channels,
        sizes.height,
        sizes.width,
        c.patch,
        c.width,
        first=c.pool == "first",
        dropout=c.embed_dropout,
        positions=c.positions,
    )
    return _looped(c, embed, velocity_for(c), _pooled(c, sizes))


def _set(c: ModelConfig, sizes: Sizes) -> Stepped:
    outside, inside = c.final_norm == "outside", c.final_norm == "inside"
    head = PooledByAttention(c.width, c.heads, sizes.classes, c.norm, outside, c.dropout)
    embed: nn.Module = PointEmbedding(sizes.dimensions, c.width, c.embed_dropout)
    layers = c.layers
    if c.depth == "discrete":  # as in the paper, the first block takes the points themselves
        embed = InducedEmbedding(sizes.dimensions, c.width, c.heads, c.inducing, c.norm)
        layers -= 1
    if c.depth == "chain":
        chain = nn.ModuleList(
            InducedBlock(c.width, c.width, c.heads, c.inducing, c.norm, outer_skip=False)
            for _ in range(layers)
        )
        return OTTransformer(embed, chain, head, c.T, c.depth)
    velocity: nn.Module = SetVelocity(layers, c.width, c.heads, c.inducing, c.norm, inside)
    return _looped(c, embed, _in_loop(c, velocity), head)


def _translator(c: ModelConfig, sizes: Sizes) -> Stepped:
    V = sizes.vocabulary
    source = Embedding(V, c.window, c.width, PAD_ID, c.embed_dropout, c.positions)
    target = Embedding(V, c.target_window, c.width, PAD_ID, c.embed_dropout, c.positions)
    head = TokenHead(c.width, V, c.final_norm == "outside", c.bias and not c.tied)
    if c.tied:
        target.tokens = source.tokens
        head.linear.weight = source.tokens.weight
    encoder = velocity_for(c)
    decoder = velocity_for(c, causal=True, memory=True)
    norm = nn.LayerNorm(c.width, bias=c.bias) if c.final_norm == "outside" else nn.Identity()
    return Translator(source, encoder, norm, target, decoder, head, c.T, c.depth)


def _pooled(c: ModelConfig, sizes: Sizes) -> PooledHead:
    return PooledHead(
        c.width,
        sizes.classes,
        c.final_norm == "outside",
        c.pool,
        c.dropout,
        norm_pooled=c.final_norm == "pooled",
        layers=c.head_layers,
    )


def velocity_for(c: ModelConfig, causal: bool = False, memory: bool = False) -> nn.Module:
    """The depth of a model: one velocity, a stack of blocks, or a chain of velocities."""
    if c.block == "timed":
        return nn.ModuleList(
            TimedVelocity(c.width, c.heads, c.hidden, c.inner_skip, causal, c.timed_attention)
            for _ in range(c.layers)
        )
    if c.depth == "chain":
        return nn.ModuleList(_blocks(c, causal, memory))
    if c.block == "runge-kutta":
        if memory and not c.scheme_in_decoder:
            return RungeKuttaStack(map(BlockFunction, _blocks(c, causal, memory)), "residual")
        if c.function != "block":
            return halves(cast(list[Block], _blocks(c, causal, memory)), c.function, c.scheme)
        return RungeKuttaStack(map(BlockFunction, _blocks(c, causal, memory)), c.scheme)
    if c.block == "evolved":
        return EvolvedStack(
            [
                EvolvedBlock(
                    c.width,
                    c.heads,
                    c.evolve,
                    c.hidden,
                    c.feedforward,
                    causal=causal,
                    memory=memory,
                    dropout=c.dropout,
                    attention_dropout=c.attention_dropout,
                )
                for _ in range(c.layers)
            ]
        )
    blocks = _blocks(c, causal, memory)
    velocity: nn.Module = BlockVelocity(blocks, c.width, c.final_norm == "inside", c.bias)
    return _in_loop(c, velocity)


def _in_loop(c: ModelConfig, velocity: nn.Module) -> nn.Module:
    if c.conditioned or c.timed:
        velocity = Conditioned(velocity, c.width, by_time=c.timed)
    residual = c.velocity == "residual"
    return Loop(velocity, c.inject, residual) if c.inject or residual else velocity


def _blocks(
    c: ModelConfig, causal: bool, memory: bool, count: int | None = None
) -> list[nn.Module]:
    return [
        CrossBlock(
            c.width,
            c.heads,
            c.hidden,
            c.norm,
            c.dropout,
            c.activation,
            c.bias,
            c.attention_dropout,
            c.activation_dropout,
            c.reach,
        )
        if memory
        else Block(
            c.width,
            c.heads,
            c.hidden,
            causal,
            c.norm,
            c.dropout,
            c.activation,
            c.bias,
            c.project,
            c.head_width,
            c.attention_dropout,
            c.activation_dropout,
            c.reach,
            outer_skip=c.depth != "chain",
        )
        for _ in range(c.layers if count is None else count)
    ]


_FAMILIES = {
    "decoder": _decoder,
    "encoder": _encoder,
    "tagger": _tagger,
    "image": _image,
    "set": _set,
    "translator": _translator,
}


def tied_weights(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another parameter, and the name of that one."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied
