"""The graphs of the tiny bundles, written node by node with onnx.helper.

The model: x = embed[token] + positions[index]; then per layer of the velocity
u += attention(u); u += relu(u @ up) @ down; the velocity is u - x, and one Euler step adds
velocity / steps to x. The classifier averages the real tokens.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from serve.bundle import Shape

OPSET = 21
IR_VERSION = 10
CONTRIB = "com.microsoft"


class GraphWriter:
    """Collects nodes and constants; every node has one output, named by its caller or by count."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._counter = 0

    def node(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        self._counter += 1
        name = out or f"{op.lower()}_{self._counter}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: object, kind: type[np.generic]) -> str:
        self._counter += 1
        name = f"constant_{self._counter}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype=kind), name))
        return name


def classify_graph(
    shape: Shape, classes: int, steps: int, h: float | None = None, tags: bool = False
) -> onnx.GraphProto:
    """A classifier rung of plain ONNX operators; its mask follows from the padding.

    Its steps have the size h, or together cross [0, 1]. With `tags` it labels each position.
    """
    w = GraphWriter()
    heads, width = shape.heads, shape.head_width
    real = w.node("Not", w.node("Equal", "tokens", w.constant(0, np.int64)))  # (B, N)
    weight = w.node("Cast", real, to=TensorProto.FLOAT)
    bias = w.node(
        "Mul",
        w.node("Sub", weight, w.constant(1, np.float32)),
        w.constant(1e9, np.float32),
    )
    bias = w.node("Unsqueeze", bias, w.constant([1, 2], np.int64))  # (B, 1, 1, N)
    length = w.node("Gather", w.node("Shape", "tokens"), w.constant(1, np.int64))
    index = w.node("Range", w.constant(0, np.int64), length, w.constant(1, np.int64))
    x = w.node("Add", w.node("Gather", "embed", "tokens"), w.node("Gather", "positions", index))
    split = w.constant([0, 0, 3 * heads, width], np.int64)
    merge = w.constant([0, 0, heads * width], np.int64)
    scale = w.constant(1.0 / math.sqrt(width), np.float32)
    for _ in range(steps):
        u = x
        for layer in range(shape.layers):
            qkv = w.node("Reshape", w.node("MatMul", u, f"qkv_{layer}"), split)
            qkv = w.node("Transpose", qkv, perm=[0, 2, 1, 3])  # (B, 3 * H, N, W)
            q, k, v = (_heads(w, qkv, part, heads) for part in range(3))
            scores = w.node("MatMul", q, w.node("Transpose", k, perm=[0, 1, 3, 2]))
            scores = w.node("Add", w.node("Mul", scores, scale), bias)
            mixed = w.node("MatMul", w.node("Softmax", scores, axis=-1), v)  # (B, H, N, W)
            mixed = w.node("Reshape", w.node("Transpose", mixed, perm=[0, 2, 1, 3]), merge)
            u = after_attention(w, u, mixed, layer)
        x = euler(w, x, u, 1 / steps if h is None else h)
    w.node("MatMul", x if tags else mean_of(w, x, weight), "head", out="logits")
    place = ["batch", "length"] if tags else ["batch"]
    return helper.make_graph(
        w.nodes,
        f"classify_{steps}",
        [value_info("tokens", TensorProto.INT64, ["batch", "length"])],
        [value_info("logits", TensorProto.FLOAT, [*place, classes])],
        w.constants,
    )


def write_graphs(
    staging: Path,
    weights_file: str,
    weights: Mapping[str, npt.NDArray[np.float32]],
    graphs: Mapping[str, onnx.GraphProto],
) -> None:
    """All graphs of a bundle, and the one weights file that they share as external data."""
    offsets, content = {}, bytearray()
    for name, array in weights.items():
        content += bytes(-len(content) % 4096)  # aligned, so that it can be mapped
        offsets[name] = len(content)
        content += array.tobytes()
    (staging / weights_file).write_bytes(content)
    for file, graph in graphs.items():
        for name, array in weights.items():
            tensor = graph.initializer.add()
            tensor.name = name
            tensor.data_type = TensorProto.FLOAT
            tensor.dims.extend(array.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", weights_file),
                ("offset", str(offsets[name])),
                ("length", str(array.nbytes)),
            ):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, value
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        (staging / file).write_bytes(model.SerializeToString())


def mean_of(w: GraphWriter, x: str, weight: str) -> str:
    """The mean (B, D) of x (B, N, D) over the positions that weight (B, N) counts."""
    weight = w.node("Unsqueeze", weight, w.constant([2], np.int64))  # (B, N, 1)
    axis = w.constant([1], np.int64)
    total = w.node("ReduceSum", w.node("Mul", x, weight), axis, keepdims=0)
    return w.node("Div", total, w.node("ReduceSum", weight, axis, keepdims=0))


def after_attention(w: GraphWriter, u: str, attended: str, layer: int) -> str:
    u = w.node("Add", u, w.node("MatMul", attended, f"mix_{layer}"))
    wide = w.node("Relu", w.node("MatMul", u, f"up_{layer}"))
    return w.node("Add", u, w.node("MatMul", wide, f"down_{layer}"))


def euler(w: GraphWriter, x: str, u: str, h: float, out: str = "") -> str:
    """x after a step of that size of the velocity u - x."""
    velocity = w.node("Sub", u, x)
    change = w.node("Mul", velocity, w.constant(h, np.float32))
    return w.node("Add", x, change, out=out)


def _heads(w: GraphWriter, qkv: str, part: int, heads: int) -> str:
    start, end = w.constant([part * heads], np.int64), w.constant([(part + 1) * heads], np.int64)
    return w.node("Slice", qkv, start, end, w.constant([1], np.int64))


def value_info(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
