"""The model that a recipe describes, for data of given sizes.

Puts modules together; how each works is its own file's business.
"""

from typing import cast

import torch
from torch import nn

from train.batch import Sizes
from train.blocks import Block, BlockVelocity, Conditioned, Loop, initialise, initialise_glorot
from train.config import ModelConfig, StepsConfig
from train.cross import CrossBlock
from train.evolve import EvolvedBlock, EvolvedStack
from train.model import (
    Coda,
    Embedding,
    OTTransformer,
    PooledHead,
    Prelude,
    Stepped,
    TokenHead,
)
from train.patches import PatchEmbedding
from train.runge_kutta import BlockFunction, RungeKuttaStack, halves
from train.sets import InducedEmbedding, PointEmbedding, PooledByAttention, SetVelocity
from train.timed import TimedVelocity
from train.translator import Translator

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
    embed = Embedding(sizes.vocabulary, c.window, c.width, PAD_ID, c.embed_dropout, c.positions)
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
    velocity: nn.Module = SetVelocity(layers, c.width, c.heads, c.inducing, c.norm, inside)
    if c.conditioned:
        velocity = Conditioned(velocity, c.width)
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
    return _in_loop(c, Conditioned(velocity, c.width) if c.conditioned else velocity)


def _in_loop(c: ModelConfig, velocity: nn.Module) -> nn.Module:
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


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
