"""Which velocities have a form with caches, and the embedding that goes before it.

Whatever calls a causal attention, in whatever order and however often, calls the cached one with
the next pair of caches. Knows modules; not the operator that takes the attention's place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.pieces import Piece
from export.ports import PAST, SEQLENS, TOTAL
from train.blocks import Attention, Block, BlockVelocity, Conditioned, Loop
from train.families import RungeKuttaStack
from train.model import Embedding, Prelude

HEAD_WIDTH_MULTIPLE = 8  # of the operator


def has_cached_form(velocity: nn.Module) -> bool:
    """Whether positions meet only in causal attention of the kind that the operator computes."""
    found = [module for module in velocity.modules() if isinstance(module, Attention)]
    return (
        _is_of_blocks(velocity)
        and all(one.causal and one.head_width % HEAD_WIDTH_MULTIPLE == 0 for one in found)
        and len({(one.heads, one.head_width) for one in found}) == 1
    )


def _is_of_blocks(velocity: nn.Module) -> bool:
    match velocity:
        case Conditioned() | Loop():
            return _is_of_blocks(velocity.velocity)
        case BlockVelocity():
            blocks = list(velocity.blocks)
        case RungeKuttaStack():
            blocks = [getattr(function, "block", function) for function in velocity.functions]
        case _:
            return False
    return all(isinstance(block, Block) for block in blocks)


class CachedEmbed(nn.Module):
    """Tokens at absolute positions, with what of them every evaluation sees again, if anything."""

    def __init__(self, embed: Embedding | Prelude) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        embed = self.embed.embed if isinstance(self.embed, Prelude) else self.embed
        assert isinstance(embed, Embedding)
        x: Tensor = embed.tokens(tokens) * embed.scale + embed.positions.at(at)  # (B, N, D)
        if isinstance(self.embed, Prelude):
            return x, self.embed.injected(x)
        return x


def after_past(piece: Piece) -> Piece:
    """An embedding at positions, fed by the length of the past instead.

    tokens (B, N), past (B,) to x, and the two lengths that the cached attention wants.
    """
    tokens, at = piece.inputs
    past, seqlens, total = PAST.name, SEQLENS.name, TOTAL.name
    nodes = (
        _node("Shape", [tokens], "count", start=1, end=2),  # (1,)
        _node("Squeeze", ["count"], "count/number"),
        _node("Range", ["zero", "count/number", "one"], "offsets"),  # (N,)
        _node("Cast", [past], "past/long", to=TensorProto.INT64),
        _node("Unsqueeze", ["past/long", "last_axis"], "past/column"),  # (B, 1)
        _node("Add", ["past/column", "offsets"], at),  # (B, N)
        _node("Cast", ["count"], "count/int", to=TensorProto.INT32),
        _node("Add", [past, "count/int"], "lengths"),  # (B,)
        _node("Sub", ["lengths", "one/int"], seqlens),  # (B,): index of the last position
        _node("ReduceMax", ["lengths"], total, keepdims=0),  # ()
    )
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "last_axis": np.array([1]),
        "one/int": np.array(1, dtype=np.int32),
    }
    return dataclasses.replace(
        piece,
        nodes=(*nodes, *piece.nodes),
        initializers=piece.initializers
        | {name: numpy_helper.from_array(value, name) for name, value in constants.items()},
        inputs=(tokens, past),
        outputs=(*piece.outputs, seqlens, total),
    )


def _node(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)
