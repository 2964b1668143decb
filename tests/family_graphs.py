"""The graphs of the other tiny bundles: images, points, whole prefixes, and translation.

The trunk is that of tests.fixtures.tiny_graphs, in plain operators. The whole-prefix decoder
computes what the one with caches does. A translator's decoder also attends to the memory, and leans
to its end more with every position, so that its answers end.
"""

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from serve.bundle import Shape
from tests.fixtures.tiny_graphs import GraphWriter, after_attention, euler, value_info

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
TOKENS = ("tokens", INT64, ("batch", "length"))
SOURCE = ("source", INT64, ("batch", "source_length"))
KEEP = ("keep", INT64, ("kept",))
Node = tuple[str, int, tuple[int | str, ...]]


def image_graph(size: tuple[int, int, int], classes: int, steps: int) -> onnx.GraphProto:
    """pixels (B, C, H, W) -> one state of all pixels, then steps of a feed-forward velocity."""
    w = GraphWriter()
    flat = w.node("Reshape", "pixels", w.constant([0, math.prod(size)], np.int64))
    x = w.node("MatMul", flat, "embed")  # (B, D)
    for _ in range(steps):
        x = euler(w, x, feed_forward(w, x), 1 / steps)
    w.node("MatMul", x, "head", out="logits")
    taken: Node = ("pixels", FLOAT, ("batch", *size))
    return plain_graph(w, [taken], ("logits", FLOAT, ("batch", classes)))


def points_graph(dimensions: int, classes: int, steps: int) -> onnx.GraphProto:
    """points (B, N, d) -> a state each, steps of a feed-forward velocity, and their mean."""
    w = GraphWriter()
    x = w.node("MatMul", "points", "embed")  # (B, N, D)
    for _ in range(steps):
        x = euler(w, x, feed_forward(w, x), 1 / steps)
    mean = w.node("ReduceMean", x, w.constant([1], np.int64), keepdims=0)  # (B, D)
    w.node("MatMul", mean, "head", out="logits")
    taken: Node = ("points", FLOAT, ("batch", "count", dimensions))
    return plain_graph(w, [taken], ("logits", FLOAT, ("batch", classes)))


def prefix_graph(
    shape: Shape, vocab_size: int, steps: int, h: float | None = None
) -> onnx.GraphProto:
    """A decoder rung without caches, of the same weights as the one with them."""
    w = GraphWriter()
    x, bias = embedded(w, "tokens"), _causal(w)
    for _ in range(steps):
        x = euler(w, x, attend_blocks(w, shape, x, bias), 1 / steps if h is None else h)
    w.node("MatMul", w.node("Gather", x, "keep", axis=1), "head", out="logits")
    return plain_graph(w, [TOKENS, KEEP], ("logits", FLOAT, ("batch", "kept", vocab_size)))


def encoder_graph(shape: Shape, steps: int) -> onnx.GraphProto:
    """source (B, S) -> memory (B, S, D)."""
    w = GraphWriter()
    x, bias = embedded(w, "source"), padding(w, "source")
    for step in range(steps):
        u = attend_blocks(w, shape, x, bias)
        x = euler(w, x, u, 1 / steps, out="memory" if step == steps - 1 else "")
    return plain_graph(w, [SOURCE], _memory(shape))


def translate_graph(shape: Shape, vocab_size: int, eos_id: int, steps: int) -> onnx.GraphProto:
    """tokens (B, N), memory, source and keep -> logits (B, K, V)."""
    w = GraphWriter()
    x, causal, pads = embedded(w, "tokens"), _causal(w), padding(w, "source")
    keys_values = _split(w, w.node("MatMul", "memory", "cross_kv"), shape, 2)
    for _ in range(steps):
        u = attend_blocks(w, shape, x, causal)
        (query,) = _split(w, w.node("MatMul", u, "cross_q"), shape, 1)
        keys, values = keys_values
        mixed = _attend(w, shape, query, keys, values, pads)
        u = w.node("Add", u, w.node("MatMul", mixed, "cross_mix"))
        x = euler(w, x, u, 1 / steps)
    logits = w.node("MatMul", w.node("Gather", x, "keep", axis=1), "head")  # (B, K, V)
    at = w.node("Unsqueeze", w.node("Cast", "keep", to=FLOAT), w.constant([1], np.int64))
    lean = w.node("Mul", at, w.constant(0.3 * np.eye(vocab_size)[eos_id : eos_id + 1], np.float32))
    w.node("Add", logits, lean, out="logits")
    return plain_graph(
        w,
        [TOKENS, SOURCE, _memory(shape), KEEP],
        ("logits", FLOAT, ("batch", "kept", vocab_size)),
    )


def _memory(shape: Shape) -> Node:
    return "memory", FLOAT, ("batch", "source_length", shape.width)


def embedded(w: GraphWriter, tokens: str) -> str:
    x = w.node("Gather", "embed", tokens)
    return w.node("Add", x, w.node("Gather", "positions", _indices(w, tokens)))


def _indices(w: GraphWriter, tokens: str) -> str:
    length = w.node("Gather", w.node("Shape", tokens), w.constant(1, np.int64))
    return w.node("Range", w.constant(0, np.int64), length, w.constant(1, np.int64))


def _causal(w: GraphWriter) -> str:
    """0 where a position may look, and a great negative number to its right: (N, N)."""
    at = _indices(w, "tokens")
    rows = w.node("Unsqueeze", at, w.constant([1], np.int64))
    later = w.node("Less", rows, w.node("Unsqueeze", at, w.constant([0], np.int64)))
    return w.node("Mul", w.node("Cast", later, to=FLOAT), w.constant(-1e9, np.float32))


def padding(w: GraphWriter, tokens: str) -> str:
    """The same where a row is padded: (B, 1, 1, S)."""
    pads = w.node("Cast", w.node("Equal", tokens, w.constant(0, np.int64)), to=FLOAT)
    bias = w.node("Mul", pads, w.constant(-1e9, np.float32))
    return w.node("Unsqueeze", bias, w.constant([1, 2], np.int64))


def attend_blocks(w: GraphWriter, shape: Shape, x: str, bias: str) -> str:
    u = x
    for layer in range(shape.layers):
        q, k, v = _split(w, w.node("MatMul", u, f"qkv_{layer}"), shape, 3)
        u = after_attention(w, u, _attend(w, shape, q, k, v, bias), layer)
    return u


def _split(w: GraphWriter, joined: str, shape: Shape, parts: int) -> list[str]:
    """(B, N, parts * H * W) -> for each part (B, H, N, W)."""
    sizes = w.constant([0, 0, parts * shape.heads, shape.head_width], np.int64)
    split = w.node("Transpose", w.node("Reshape", joined, sizes), perm=[0, 2, 1, 3])
    axis = w.constant([1], np.int64)
    ends = [w.constant([part * shape.heads], np.int64) for part in range(parts + 1)]
    return [w.node("Slice", split, ends[part], ends[part + 1], axis) for part in range(parts)]


def _attend(w: GraphWriter, shape: Shape, q: str, k: str, v: str, bias: str) -> str:
    scale = w.constant(1.0 / math.sqrt(shape.head_width), np.float32)
    scores = w.node("MatMul", q, w.node("Transpose", k, perm=[0, 1, 3, 2]))
    scores = w.node("Add", w.node("Mul", scores, scale), bias)
    mixed = w.node("MatMul", w.node("Softmax", scores, axis=-1), v)  # (B, H, N, W)
    merge = w.constant([0, 0, shape.heads * shape.head_width], np.int64)
    return w.node("Reshape", w.node("Transpose", mixed, perm=[0, 2, 1, 3]), merge)


def feed_forward(w: GraphWriter, x: str) -> str:
    wide = w.node("Relu", w.node("MatMul", x, "up"))
    return w.node("Add", x, w.node("MatMul", wide, "down"))


def plain_graph(w: GraphWriter, inputs: list[Node], output: Node) -> onnx.GraphProto:
    infos = [value_info(name, kind, shape) for name, kind, shape in inputs]
    return helper.make_graph(w.nodes, "tiny", infos, [value_info(*output)], w.constants)
