"""The three pieces of a model that torch's exporter traces: embed, ONE velocity evaluation, head.

Knows torch modules and their ONNX form; not how many steps a rung will have.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from train.blocks import Attention, Block, BlockVelocity
from train.model import Embedding, OTTransformer

OPSET = 21


@dataclass(frozen=True, slots=True)
class Piece:
    """A traced piece: plain ONNX nodes between named values; initializers by name."""

    nodes: tuple[onnx.NodeProto, ...]
    initializers: dict[str, onnx.TensorProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every rung of a bundle is stitched from."""

    task: str
    embed: Piece  # classify: tokens -> x, mask; generate: tokens, past -> x, seqlens, total
    velocity: Piece  # x, mask -> v; generate: x, seqlens, total, caches -> v, caches
    head: Piece  # x, mask -> logits; generate: x, keep -> logits
    layers: int
    heads: int
    head_width: int


class DecoderEmbed(nn.Module):
    """Tokens at absolute positions, and the two lengths that the cached attention wants."""

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = embed.tokens, embed.positions

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        N = tokens.shape[1]
        at = past.long()[:, None] + torch.arange(N)[None, :]  # (B, N)
        x = self.tokens(tokens) + self.positions(at)  # (B, N, D)
        last = past + (N - 1)  # (B,): index of the last position of each row
        return x, last.int(), (last.amax(0) + 1).int()


class CachedAttention(nn.Module):
    """The causal attention of a block on cached keys and values, as ONNX Runtime's operator.

    The operator cannot run in torch: the block's own attention is the reference it is verified by.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, x: Tensor, key: Tensor, value: Tensor, seqlens: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.attention.heads
        y, key_out, value_out = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [self.attention.qkv(x), None, None, key, value, seqlens, total],
            attrs={"num_heads": heads, "kv_num_heads": heads},
            dtypes=[torch.float32] * 3,
            shapes=[x.shape, key.shape, value.shape],
            version=1,
        )
        return self.attention.out(y), key_out, value_out


class CachedVelocity(nn.Module):
    """One evaluation of the velocity that reads and extends the caches of its layers."""

    def __init__(self, velocity: BlockVelocity) -> None:
        super().__init__()
        self.velocity = velocity
        self.attention = nn.ModuleList(CachedAttention(b.attention) for b in _blocks(velocity))

    def forward(
        self, x: Tensor, seqlens: Tensor, total: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        out: list[Tensor] = []
        for i, block in enumerate(_blocks(self.velocity)):
            before = x if block.norm == "post" else block.norm1(x)
            y, key, value = self.attention[i](
                before, caches[2 * i], caches[2 * i + 1], seqlens, total
            )
            out += [key, value]
            if block.norm == "post":
                x = block.norm1(x + y)
                x = block.norm2(x + block.feedforward(x))
            else:
                x = x + y
                x = x + block.feedforward(block.norm2(x))
        return (self.velocity.norm(x), *out)


class KeptHead(nn.Module):
    """Logits of the kept positions only, so that a prefill pays for one."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        logits: Tensor = self.head(x.index_select(1, keep))
        return logits


def trace(model: OTTransformer) -> Parts:
    """The pieces of a trained model."""
    blocks = _blocks(_velocity(model))
    width = blocks[0].attention.out.in_features
    heads = blocks[0].attention.heads
    B, N, C = 2, 3, 8
    x = torch.randn(B, N, width)
    shape = {"layers": len(blocks), "heads": heads, "head_width": width // heads}
    rows = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    row = {0: torch.export.Dim.DYNAMIC}
    tokens = torch.ones(B, N, dtype=torch.int64)
    if not blocks[0].attention.causal:
        mask = torch.tensor([[True] * N, [True] * (N - 1) + [False]])
        embed = _trace(model.embed, (tokens,), (rows,))
        velocity = _trace(model.velocity, (x, mask), (rows, rows))
        head = _trace(model.head, (x, mask), (rows, rows))
        return Parts("classify", embed, velocity, head, **shape)
    past = torch.zeros(B, dtype=torch.int32)
    seqlens, total = torch.full((B,), N - 1, dtype=torch.int32), torch.tensor(N, dtype=torch.int32)
    caches = [torch.zeros(B, heads, C, width // heads) for _ in range(2 * len(blocks))]
    slots = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    embed = _trace(DecoderEmbed(_embedding(model)), (tokens, past), (rows, row))
    velocity = _trace(
        CachedVelocity(_velocity(model)),
        (x, seqlens, total, *caches),
        (rows, row, None, (slots,) * len(caches)),
    )
    head = _trace(KeptHead(model.head), (x, torch.tensor([0, 2])), (rows, row))
    return Parts("generate", embed, velocity, head, **shape)


def _velocity(model: OTTransformer) -> BlockVelocity:
    if not isinstance(model.velocity, BlockVelocity):
        raise ValueError(f"cannot export a velocity of type {type(model.velocity).__name__}")
    return model.velocity


def _embedding(model: OTTransformer) -> Embedding:
    if not isinstance(model.embed, Embedding):
        raise ValueError(f"cannot export an embedding of type {type(model.embed).__name__}")
    return model.embed


def _blocks(velocity: BlockVelocity) -> list[Block]:
    return [block for block in velocity.blocks if isinstance(block, Block)]


def _trace(module: nn.Module, arguments: tuple[Any, ...], shapes: tuple[Any, ...]) -> Piece:
    with _quiet():
        program = torch.onnx.export(
            module.eval(),
            arguments,
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    graph = program.model_proto.graph
    if program.model_proto.functions:
        raise RuntimeError("the exporter left local functions in the graph; they are not stitched")
    return Piece(
        tuple(graph.node),
        {tensor.name: tensor for tensor in graph.initializer},
        tuple(value.name for value in graph.input),
        tuple(value.name for value in graph.output),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that a text model never uses, and of its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
