"""The graphs of one step of the tiny bundles, written node by node like their rungs.

A velocity is u - x, so one step adds h (u - x) to x, where u is what the blocks make of x.
"""

import math

import numpy as np
import onnx
from onnx import TensorProto, helper

from serve.bundle import Shape, StepFiles
from tests.family_graphs import Node, attend_blocks, embedded, feed_forward, padding, plain_graph
from tests.tiny_graphs import CONTRIB, GraphWriter, after_attention, mean_of

INT64, INT32, FLOAT = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
FILES = StepFiles("embed.onnx", "step.onnx", "head.onnx")
TOKENS: Node = ("tokens", INT64, ("batch", "length"))
H: Node = ("h", FLOAT, ("batch",))
Graphs = dict[str, onnx.GraphProto]


def decoder_steps(shape: Shape, vocab_size: int) -> Graphs:
    """GroupQueryAttention updates the caches of every layer."""
    state = ("batch", "length", shape.width)
    lengths: list[Node] = [("seqlens", INT32, ("batch",)), ("total", INT32, ())]
    past: Node = ("past", INT32, ("batch",))
    keep: Node = ("keep", INT64, ("kept",))
    head = GraphWriter()
    head.node("MatMul", head.node("Gather", "x", "keep", axis=1), "head", out="logits")
    return {
        FILES.embed: _many(_decoder_embed(), [TOKENS, past], [("x", FLOAT, state), *lengths]),
        FILES.step: _decoder_step(shape, state, lengths),
        FILES.head: plain_graph(
            head, [("x", FLOAT, state), keep], ("logits", FLOAT, ("batch", "kept", vocab_size))
        ),
    }


def text_steps(shape: Shape, classes: int, tags: bool = False) -> Graphs:
    """With `tags` a label at each position, and context_0 alone.

    context_0, the bias of the padding, is the step's; context_1, the weights, is the head's."""
    state: Node = ("x", FLOAT, ("batch", "length", shape.width))
    bias: Node = ("context_0", FLOAT, ("batch", 1, 1, "length"))
    weight: Node = ("context_1", FLOAT, ("batch", "length"))
    embed, step, head = GraphWriter(), GraphWriter(), GraphWriter()
    embed.node("Identity", embedded(embed, "tokens"), out="x")
    embed.node("Identity", padding(embed, "tokens"), out="context_0")
    real = embed.node("Not", embed.node("Equal", "tokens", embed.constant(0, np.int64)))
    embed.node("Cast", real, to=FLOAT, out="context_1")
    _along(step, attend_blocks(step, shape, "x", "context_0"), 3)
    if tags:
        head.node("MatMul", "x", "head", out="logits")
        logits: Node = ("logits", FLOAT, ("batch", "length", classes))
    else:
        head.node("MatMul", mean_of(head, "x", "context_1"), "head", out="logits")
        logits = ("logits", FLOAT, ("batch", classes))
    return {
        FILES.embed: _many(embed, [TOKENS], [state, bias, weight]),
        FILES.step: plain_graph(step, [state, H, bias], _next(state)),
        FILES.head: plain_graph(head, [state] if tags else [state, weight], logits),
    }


def image_steps(size: tuple[int, int, int], width: int, classes: int) -> Graphs:
    state: Node = ("x", FLOAT, ("batch", width))
    embed, head = GraphWriter(), GraphWriter()
    flat = embed.node("Reshape", "pixels", embed.constant([0, math.prod(size)], np.int64))
    embed.node("MatMul", flat, "embed", out="x")
    head.node("MatMul", "x", "head", out="logits")
    return _fed_forward(embed, head, ("pixels", FLOAT, ("batch", *size)), state, classes)


def points_steps(dimensions: int, width: int, classes: int) -> Graphs:
    state: Node = ("x", FLOAT, ("batch", "count", width))
    embed, head = GraphWriter(), GraphWriter()
    embed.node("MatMul", "points", "embed", out="x")
    mean = head.node("ReduceMean", "x", head.constant([1], np.int64), keepdims=0)  # (B, D)
    head.node("MatMul", mean, "head", out="logits")
    taken: Node = ("points", FLOAT, ("batch", "count", dimensions))
    return _fed_forward(embed, head, taken, state, classes)


def _fed_forward(
    embed: GraphWriter, head: GraphWriter, taken: Node, state: Node, classes: int
) -> Graphs:
    step = GraphWriter()
    _along(step, feed_forward(step, "x"), len(state[2]))
    return {
        FILES.embed: plain_graph(embed, [taken], state),
        FILES.step: plain_graph(step, [state, H], _next(state)),
        FILES.head: plain_graph(head, [state], ("logits", FLOAT, ("batch", classes))),
    }


def _decoder_embed() -> GraphWriter:
    w = GraphWriter()
    length = w.node("Gather", w.node("Shape", "tokens"), w.constant(1, np.int64))
    length32 = w.node("Cast", length, to=INT32)
    # GroupQueryAttention wants the index of each row's last position, and the greatest length.
    last = w.node("Add", "past", length32)
    w.node("Sub", last, w.constant(1, np.int32), out="seqlens")
    w.node("Add", w.node("ReduceMax", "past", keepdims=0), length32, out="total")
    of_row = w.node("Range", w.constant(0, np.int64), length, w.constant(1, np.int64))
    past = w.node("Unsqueeze", w.node("Cast", "past", to=INT64), w.constant([1], np.int64))
    at = w.node("Gather", "positions", w.node("Add", past, of_row))
    w.node("Add", w.node("Gather", "embed", "tokens"), at, out="x")
    return w


def _decoder_step(
    shape: Shape, state: tuple[int | str, ...], lengths: list[Node]
) -> onnx.GraphProto:
    w, u = GraphWriter(), "x"
    size = ("batch", shape.heads, "capacity", shape.head_width)
    caches = [f"{part}_0_{layer}" for layer in range(shape.layers) for part in ("k", "v")]
    for layer in range(shape.layers):
        key, value = f"k_0_{layer}", f"v_0_{layer}"
        qkv = w.node("MatMul", u, f"qkv_{layer}")  # (B, N, 3 * H * W)
        w.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [qkv, "", "", key, value, "seqlens", "total"],
                [f"attended_{layer}", f"{key}_out", f"{value}_out"],
                name=f"attended_{layer}",
                domain=CONTRIB,
                num_heads=shape.heads,
                kv_num_heads=shape.heads,
            )
        )
        u = after_attention(w, u, f"attended_{layer}", layer)
    _along(w, u, 3)
    taken: list[Node] = [(name, FLOAT, size) for name in caches]
    given: list[Node] = [(f"{name}_out", FLOAT, size) for name in caches]
    return _many(w, [("x", FLOAT, state), H, *lengths, *taken], [("y", FLOAT, state), *given])


def _along(w: GraphWriter, u: str, rank: int) -> None:
    """y = x + h (u - x)."""
    size = w.node("Unsqueeze", "h", w.constant(list(range(1, rank)), np.int64))
    w.node("Add", "x", w.node("Mul", w.node("Sub", u, "x"), size), out="y")


def _next(state: Node) -> Node:
    return "y", state[1], state[2]


def _many(w: GraphWriter, inputs: list[Node], outputs: list[Node]) -> onnx.GraphProto:
    graph = plain_graph(w, inputs, outputs[0])
    for name, kind, shape in outputs[1:]:
        graph.output.append(helper.make_tensor_value_info(name, kind, shape))
    return graph
