"""Attention in a graph: as plain operators, fused, or with a KV cache.

Plain operators run on any runtime. The fused form is ONNX Runtime's operator that never holds the
scores of all pairs; the form with a cache is its operator on packed queries, keys and values. For
TensorRT, which has no such operator, the latter is written out: keys and values of earlier
positions are inputs, and those of the new positions outputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.pieces import DOMAIN, NAME, PAST, SEQLENS, TOTAL, Piece, known_contents
from train.blocks import Attention, Block, BlockVelocity, Conditioned, Loop, rotations
from train.families import RungeKuttaStack
from train.model import Embedding, Prelude

CONTRIB = "com.microsoft"
FUSED = "MultiHeadAttention"  # of that domain
CACHED = "GroupQueryAttention"
# Added to a score it leaves nothing of it and, unlike infinity, never makes a NaN.
NEVER = -1e30


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """The node of one attention."""

    qkv: str  # (B, N, 3 H d)
    mask: str  # (B, N), or "" for none
    y: str  # (B, N, H d)
    heads: int
    kv_heads: int
    head_width: int
    causal: bool
    rotary: int  # channels of each head that are rotated by their position
    theta: float
    window: int  # positions that are known, where some are rotated

    @property
    def tables(self) -> dict[str, onnx.TensorProto]:
        """Cosines and sines of all positions (window, rotary / 2), by name."""
        if not self.rotary:
            return {}
        made = rotations(self.window, self.rotary, self.theta)
        names = (f"rotary.{name}.{self.rotary}.{self.theta!r}" for name in ("cos", "sin"))
        return {
            name: numpy_helper.from_array(table.numpy(), name)
            for name, table in zip(names, made, strict=True)
        }


def marks(piece: Piece) -> list[Mark]:
    """The attentions of a piece, in their order."""
    return [_read(node) for node in piece.nodes if _is_mark(node)]


def written_out(piece: Piece) -> Piece:
    """The piece with its attentions in plain operators."""
    return _written(piece, fuse=False)


def fused(piece: Piece) -> Piece:
    """The piece with its attentions as one operator each, but for causal ones, which are plain."""
    return _written(piece, fuse=True)


def _written(piece: Piece, fuse: bool) -> Piece:
    write = _NodeWriter()
    for node in piece.nodes:
        if not _is_mark(node):
            write.nodes.append(node)
            continue
        mark = _read(node)
        if fuse and not mark.causal:
            write.fused(mark)
        else:
            write.plain(mark)
    return dataclasses.replace(
        piece,
        nodes=tuple(write.nodes),
        initializers=piece.initializers | write.constants,
        contents=piece.contents | known_contents(write.constants),
    )


def with_caches(piece: Piece) -> Piece:
    """The piece with its attentions on caches.

    x, seqlens, total, ..., then keys and values of each attention, to v and the caches extended.
    """
    nodes: list[onnx.NodeProto] = []
    taken: list[str] = []
    given: list[str] = []
    tables: dict[str, onnx.TensorProto] = {}
    for node in piece.nodes:
        if not _is_mark(node):
            nodes.append(node)
            continue
        mark = _read(node)
        caches = [f"{mark.y}/{name}" for name in ("keys", "values")]
        extended = [f"{cache}/extended" for cache in caches]
        tables |= mark.tables
        nodes.append(
            helper.make_node(
                CACHED,
                [mark.qkv, "", "", *caches, "seqlens", "total", *mark.tables],
                [mark.y, *extended],
                name=mark.y,
                domain=CONTRIB,
                num_heads=mark.heads,
                kv_num_heads=mark.kv_heads,
                do_rotary=int(mark.rotary > 0),
            )
        )
        taken += caches
        given += extended
    x, *rest = piece.inputs
    return dataclasses.replace(
        piece,
        nodes=tuple(nodes),
        inputs=(x, "seqlens", "total", *rest, *taken),
        outputs=(*piece.outputs, *given),
        initializers=piece.initializers | tables,
        contents=piece.contents | known_contents(tables),
    )


def write_out_caches(model: onnx.ModelProto, kind: int) -> None:
    """Have a decoder's step attend in plain operators to keys and values of this type, in place.

    Caches become (batch, capacity, heads, head_width), and what comes out are those of the new
    positions alone, (batch, length, heads, head_width). `total` is no longer an input.
    """
    graph, write = model.graph, _NodeWriter()
    ports = {port.name: port for port in (*graph.input, *graph.output)}
    for node in graph.node:
        if node.op_type != CACHED:
            write.nodes.append(node)
            continue
        width = ports[node.input[3]].type.tensor_type.shape.dim[3].dim_value
        tables = {one.name: one.dims[1] for one in graph.initializer if one.name in node.input[7:]}
        write.on_past(node, width, 2 * max(tables.values(), default=0), kind)
        for names, side in ((node.input[3:5], "capacity"), (node.output[1:3], "length")):
            for name in names:
                batch, heads, _, _ = ports[name].type.tensor_type.shape.dim
                sizes = [batch.dim_param, side, heads.dim_value, width]
                ports[name].CopyFrom(helper.make_tensor_value_info(name, kind, sizes))
    kept = [port for port in graph.input if port.name != TOTAL.name]
    del graph.input[:], graph.node[:], graph.value_info[:]
    graph.input.extend(kept)
    graph.node.extend(write.nodes)
    graph.initializer.extend(write.constants.values())
    _leave_contrib(model)


def write_out_fused(model: onnx.ModelProto) -> None:
    """Have a classifier's step attend in plain operators, in place."""
    graph, write = model.graph, _NodeWriter()
    for node in graph.node:
        if node.op_type == FUSED and node.domain == CONTRIB:
            write.plainly(node)
        else:
            write.nodes.append(node)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(write.nodes)
    graph.initializer.extend(write.constants.values())
    _leave_contrib(model)


def _leave_contrib(model: onnx.ModelProto) -> None:
    plain = [one for one in model.opset_import if one.domain != CONTRIB]
    del model.opset_import[:]
    model.opset_import.extend(plain)


def _is_mark(node: onnx.NodeProto) -> bool:
    return bool(node.domain == DOMAIN and node.op_type == NAME)


def _read(node: onnx.NodeProto) -> Mark:
    facts = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    qkv, mask = (*node.input, "")[:2]
    return Mark(
        qkv,
        mask,
        node.output[0],
        facts["heads"],
        facts["kv_heads"],
        facts["head_width"],
        bool(facts["causal"]),
        facts["rotary"],
        facts["theta"],
        facts["window"],
    )


class _NodeWriter:
    """The nodes so far; what several attentions add to their scores is made once."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._made: set[str] = set()

    def plain(self, mark: Mark) -> None:
        y, H, K, d = mark.y, mark.heads, mark.kv_heads, mark.head_width
        heads = self._node("Reshape", [mark.qkv, self._sizes(0, 0, H + 2 * K, d)], f"{y}/by_head")
        heads = self._node("Transpose", [heads], f"{y}/heads", perm=[0, 2, 1, 3])
        if H == K:
            q, k, v = self._split(heads, y, axis=1)  # (B, H, N, d)
        else:
            q, k, v = self._parts(heads, f"{y}/split", 1, H, K, K)
        if mark.rotary:
            q, k = self._rotated(mark, q), self._rotated(mark, k)
        if H != K:
            k, v = (self._shared(part, H // K, H, d) for part in (k, v))
        k = self._node("Transpose", [k], f"{k}/turned", perm=[0, 1, 3, 2])  # (B, H, d, N)
        q = self._node("Mul", [q, self._number(d**-0.5)], f"{y}/scaled")
        scores = self._node("MatMul", [q, k], f"{y}/scores")  # (B, H, N, N)
        if mark.causal:
            scores = self._node("Add", [scores, self._past_only(mark.qkv)], f"{y}/allowed")
        elif mark.mask:
            only = self._present_only(mark.mask, 1, 2)  # (B, 1, 1, N)
            scores = self._node("Add", [scores, only], f"{y}/allowed")
            # A row of padding alone then gives 0, as in torch, whatever its weights are.
            v = self._node("Mul", [v, self._present(mark.mask, 1, 3)], f"{y}/v/present")
        weights = self._node("Softmax", [scores], f"{y}/weights", axis=-1)
        seen = self._node("MatMul", [weights, v], f"{y}/seen")  # (B, H, N, d)
        seen = self._node("Transpose", [seen], f"{y}/joined", perm=[0, 2, 1, 3])
        self._node("Reshape", [seen, self._sizes(0, 0, H * d)], y)  # (B, N, H d)

    def on_past(self, node: onnx.NodeProto, width: int, rotary: int, kind: int) -> None:
        """Attention of new positions to earlier ones, which are given, and to themselves."""
        facts = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        H, K, d = facts["num_heads"], facts["kv_num_heads"], width
        qkv, _, _, *caches, seqlens, _ = node.input[:7]
        y, *given = node.output
        heads = self._node("Reshape", [qkv, self._sizes(0, 0, H + 2 * K, d)], f"{y}/by_head")
        q, k, v = self._parts(heads, f"{y}/split", 2, H, K, K)  # (B, S, ., d)
        past = self._lengths(qkv, seqlens)  # (B,)
        if rotary:
            turns = [self._at_positions(table, qkv, past) for table in node.input[7:]]
            q, k = (self._turned(one, rotary, d, *turns) for one in (q, k))
        for part, name in zip((k, v), given, strict=True):
            self._node("Cast", [part], name, to=kind)
        # What is attended to is what the caches hold, new positions included.
        new = [self._node("Cast", [name], f"{name}/float", to=TensorProto.FLOAT) for name in given]
        old = [self._node("Cast", [name], f"{name}/float", to=TensorProto.FLOAT) for name in caches]
        q = self._node("Transpose", [q], f"{q}/heads", perm=[0, 2, 1, 3])  # (B, H, S, d)
        q = self._node("Mul", [q, self._number(d**-0.5)], f"{y}/scaled")
        capacity = self._length(caches[0])
        scores, values = [], []
        for what, allowed in ((old, self._known(capacity, past)), (new, self._past_only(qkv))):
            k, v = (self._by_all_heads(part, H, K, d) for part in what)  # (B, H, N, d)
            values.append(v)
            k = self._node("Transpose", [k], f"{k}/turned", perm=[0, 1, 3, 2])
            found = self._node("MatMul", [q, k], f"{k}/scores")  # (B, H, S, N)
            scores.append(self._node("Add", [found, allowed], f"{found}/allowed"))
        both = self._node("Concat", scores, f"{y}/scores", axis=3)
        weights = self._node("Softmax", [both], f"{y}/weights", axis=-1)
        zero, axis, all_ = self._sizes(0), self._sizes(3), self._sizes(1 << 31)
        seen = [
            self._node(
                "MatMul",
                [self._node("Slice", [weights, first, end, axis], f"{value}/weights"), value],
                f"{value}/seen",
            )
            for first, end, value in (
                (zero, capacity, values[0]),
                (capacity, all_, values[1]),
            )
        ]
        joined = self._node("Add", seen, f"{y}/seen")  # (B, H, S, d)
        joined = self._node("Transpose", [joined], f"{y}/joined", perm=[0, 2, 1, 3])
        self._node("Reshape", [joined, self._sizes(0, 0, H * d)], y)  # (B, S, H d)

    def _length(self, value: str) -> str:
        """The size (1,) of a value (B, N, ...) along N."""
        name = f"{value}/size_1"
        if self._is_new(name):
            self._node("Shape", [value], name, start=1, end=2)
        return name

    def _up_to(self, length: str) -> str:
        """0, 1, ... below a size (1,)."""
        name = f"{length}/numbers"
        if self._is_new(name):
            end = self._node("Squeeze", [length, self._sizes(0)], f"{name}/end")
            zero, one = (self._constant(f"number.{n}", np.array(n)) for n in (0, 1))
            self._node("Range", [zero, end, one], name)
        return name

    def _lengths(self, qkv: str, seqlens: str) -> str:
        """The earlier positions (B,) of each row; `seqlens` is the index of its last new one."""
        name = f"{seqlens}/past"
        if self._is_new(name):
            last = self._node("Cast", [seqlens], f"{name}/last", to=TensorProto.INT64)
            first = self._node("Sub", [last, self._length(qkv)], f"{name}/before")
            self._node("Add", [first, self._sizes(1)], name)
        return name

    def _known(self, capacity: str, past: str) -> str:
        """What scores need added so that only positions that are there count: (B, 1, 1, C)."""
        name = f"{past}/known_only"
        if self._is_new(name):
            column = self._node("Unsqueeze", [past, self._sizes(1, 2, 3)], f"{name}/column")
            there = self._node("Less", [self._up_to(capacity), column], f"{name}/there")
            self._node("Where", [there, self._number(0.0), self._number(NEVER)], name)
        return name

    def _at_positions(self, table: str, qkv: str, past: str) -> str:
        """Rows (B, S, 1, .) of a table, one for each new position."""
        name = f"{table}/at"
        if self._is_new(name):
            column = self._node("Unsqueeze", [past, self._sizes(1)], f"{name}/column")
            offsets = self._up_to(self._length(qkv))
            at = self._node("Add", [column, offsets], f"{name}/positions")
            rows = self._node("Gather", [table, at], f"{name}/rows", axis=0)
            self._node("Unsqueeze", [rows, self._sizes(2)], name)
        return name

    def _by_all_heads(self, part: str, heads: int, own: int, width: int) -> str:
        """Keys or values (B, N, K, d) as (B, H, N, d)."""
        part = self._node("Transpose", [part], f"{part}/heads", perm=[0, 2, 1, 3])
        return part if heads == own else self._shared(part, heads // own, heads, width)

    def fused(self, mark: Mark) -> None:
        """The operator with a mask would hold all scores; so the mask is one more number a head.

        A query has a 1 there and a key what its score needs added.
        """
        y, H, d = mark.y, mark.heads, mark.head_width
        q, k, v = self._split(mark.qkv, y, axis=2)  # (B, N, H d)
        if mark.mask:
            sizes = self._one_a_head(mark.mask, H)
            one = self._node("Expand", [self._number(1.0), sizes], f"{y}/q/one")  # (B, N, H, 1)
            only = self._present_only(mark.mask, 2, 3)  # (B, N, 1, 1)
            only = self._node("Expand", [only, sizes], f"{y}/k/only")  # (B, N, H, 1)
            q, k = self._wider(q, one, H, d), self._wider(k, only, H, d)  # (B, N, H (d + 1))
            v = self._node("Mul", [v, self._present(mark.mask, 2)], f"{y}/v/present")
        self.nodes.append(
            helper.make_node(
                FUSED,
                [q, k, v],
                [y],
                name=y,
                domain=CONTRIB,
                num_heads=H,
                scale=d**-0.5,
            )
        )

    def plainly(self, node: onnx.NodeProto) -> None:
        """What the operator computes, which is given q, k and v as (B, N, H d) and no mask."""
        y = node.output[0]
        facts = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        by_head = [self._by_head(part, facts["num_heads"], -1) for part in node.input]
        orders = {"queries": [0, 2, 1, 3], "keys": [0, 2, 3, 1], "values": [0, 2, 1, 3]}
        heads = [
            self._node("Transpose", [part], f"{y}/{name}", perm=order)
            for part, (name, order) in zip(by_head, orders.items(), strict=True)
        ]
        scores = self._node("MatMul", heads[:2], f"{y}/scores")  # (B, H, N, N)
        scores = self._node("Mul", [scores, self._number(facts["scale"])], f"{y}/scaled")
        shares = self._node("Softmax", [scores], f"{y}/shares", axis=-1)
        seen = self._node("MatMul", [shares, heads[2]], f"{y}/seen")  # (B, H, N, d)
        joined = self._node("Transpose", [seen], f"{y}/joined", perm=[0, 2, 1, 3])
        self._node("Reshape", [joined, self._sizes(0, 0, -1)], y)  # (B, N, H d)

    def _split(self, qkv: str, y: str, axis: int) -> list[str]:
        parts = [f"{y}/{part}" for part in "qkv"]
        split = helper.make_node("Split", [qkv], parts, f"{y}/split", axis=axis, num_outputs=3)
        self.nodes.append(split)
        return parts

    def _parts(self, value: str, name: str, axis: int, *sizes: int) -> list[str]:
        """The parts of a value, of these sizes along an axis."""
        parts = [f"{name}/{index}" for index in range(len(sizes))]
        split = helper.make_node("Split", [value, self._sizes(*sizes)], parts, name, axis=axis)
        self.nodes.append(split)
        return parts

    def _rotated(self, mark: Mark, part: str) -> str:
        """Queries or keys (B, H, N, d), each rotated by its position."""
        cos, sin = (self._up_to_length(mark, name) for name in mark.tables)  # (N, rotary / 2)
        return self._turned(part, mark.rotary, mark.head_width, cos, sin)

    def _turned(self, part: str, rotary: int, width: int, cos: str, sin: str) -> str:
        """The first channels of each head, turned; the others as they are."""
        half, rest = rotary // 2, width - rotary
        a, b, *others = self._parts(
            part, f"{part}/rotary", 3, half, half, *([rest] if rest else [])
        )
        turned = [
            self._node(
                op,
                [
                    self._node("Mul", [one, cos], f"{one}/cos"),
                    self._node("Mul", [other, sin], f"{other}/sin"),
                ],
                f"{one}/turned",
            )
            for op, one, other in (("Sub", a, b), ("Add", b, a))
        ]
        return self._node("Concat", [*turned, *others], f"{part}/rotated", axis=3)

    def _up_to_length(self, mark: Mark, table: str) -> str:
        """The first rows of a table, as many as there are positions."""
        name = f"{table}/known"
        if self._is_new(name):
            self.constants |= mark.tables
            length = self._node("Shape", [mark.qkv], f"{name}/length", start=1, end=2)
            self._node("Slice", [table, self._sizes(0), length, self._sizes(0)], name)
        return name

    def _shared(self, part: str, times: int, heads: int, width: int) -> str:
        """Keys or values (B, K, N, d) for all heads (B, H, N, d) that share them."""
        wide = self._node("Unsqueeze", [part, self._sizes(2)], f"{part}/wide")
        wide = self._node("Expand", [wide, self._sizes(1, 1, times, 1, 1)], f"{part}/repeated")
        return self._node("Reshape", [wide, self._sizes(0, heads, -1, width)], f"{part}/shared")

    def _by_head(self, part: str, heads: int, width: int) -> str:
        return self._node("Reshape", [part, self._sizes(0, 0, heads, width)], f"{part}/by_head")

    def _wider(self, part: str, more: str, heads: int, width: int) -> str:
        """(B, N, H d) and (B, N, H, 1) to (B, N, H (d + 1))."""
        both = [self._by_head(part, heads, width), more]
        wide = self._node("Concat", both, f"{part}/wide", axis=3)
        return self._node("Reshape", [wide, self._sizes(0, 0, heads * (width + 1))], f"{part}/flat")

    def _one_a_head(self, mask: str, heads: int) -> str:
        """The sizes B, N, H, 1."""
        name = f"{mask}/one_a_head_of_{heads}"
        if self._is_new(name):
            size = self._node("Shape", [mask], f"{name}/mask")
            self._node("Concat", [size, self._sizes(heads, 1)], name, axis=0)
        return name

    def _past_only(self, qkv: str) -> str:
        """What scores need added so that no position sees a later one: (N, N)."""
        name = "past_only"
        if self._is_new(name):
            length = self._node("Shape", [qkv], f"{name}/length", start=1, end=2)
            size = self._node("Concat", [length, length], f"{name}/size", axis=0)
            never = numpy_helper.from_array(np.array([NEVER], dtype=np.float32))
            full = self._node("ConstantOfShape", [size], f"{name}/full", value=never)
            above = self._constant("above", np.array(1, dtype=np.int64))
            self._node("Trilu", [full, above], name, upper=1)
        return name

    def _present_only(self, mask: str, *axes: int) -> str:
        """What a score needs added if its key is padding, with dimensions of 1 at these axes."""
        name = f"{mask}/present_only"
        if self._is_new(name):
            wide = self._node("Unsqueeze", [mask, self._sizes(*axes)], f"{name}/wide")
            self._node("Where", [wide, self._number(0.0), self._number(NEVER)], name)
        return name

    def _present(self, mask: str, *axes: int) -> str:
        """1 where there is a token and 0 where there is padding, with these dimensions of 1."""
        name = f"{mask}/present"
        if self._is_new(name):
            wide = self._node("Unsqueeze", [mask, self._sizes(*axes)], f"{name}/wide")
            self._node("Cast", [wide], name, to=onnx.TensorProto.FLOAT)
        return name

    def _is_new(self, name: str) -> bool:
        new = name not in self._made
        self._made.add(name)
        return new

    def _node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def _sizes(self, *sizes: int) -> str:
        return self._constant(f"sizes.{sizes}", np.array(sizes, dtype=np.int64))

    def _number(self, value: float) -> str:
        return self._constant(f"number.{value!r}", np.array(value, dtype=np.float32))

    def _constant(self, name: str, array: "np.ndarray[Any, Any]") -> str:
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


# Which velocities can run with a KV cache, and the embedding for it. Each call of a causal
# attention becomes a call of the cached one, with the next pair of caches.


HEAD_WIDTH_MULTIPLE, ROTARY_MULTIPLE = 8, 16  # of the operator
CACHED_HEADS = (
    "the width of a head (model.width / model.heads) must be a multiple of "
    f"{HEAD_WIDTH_MULTIPLE}, and the channels of it that rotary positions turn, of "
    f"{ROTARY_MULTIPLE}"
)


def has_cached_form(velocity: nn.Module) -> bool:
    """Whether positions meet only in causal attention of the kind that the operator computes."""
    found = [module for module in velocity.modules() if isinstance(module, Attention)]
    return (
        _is_of_blocks(velocity)
        and all(one.causal and one.head_width % HEAD_WIDTH_MULTIPLE == 0 for one in found)
        and all(one.rotary % ROTARY_MULTIPLE == 0 for one in found)
        and len({(one.kv_heads, one.head_width) for one in found}) == 1
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
        x: Tensor = embed.tokens(tokens) * embed.scale  # (B, N, D)
        if embed.positions is not None:
            x = x + embed.positions.at(at)
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
