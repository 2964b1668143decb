"""Weights of 16 bits: fp16 or bf16 matrices in the file, and fp16 keys and values.

Matrices that are multiplied with or looked up become 16 bits; norms, biases, states and softmax
stay float32. An fp16 product is a product of fp16 in the graph: a GPU computes it so, and ONNX
Runtime's CPU provider, which has no such product, makes it one of float32 when it loads the graph.
It does that only for a matrix with one product; one with several would become float32 in every
call. So in the graphs of one step each product has a name of its own for the matrix, which is in
the file once; and a model without such graphs multiplies in float32. The CPU provider has no
product of bf16 either and does not replace it, so bf16 weights pass a cast into a float32 product.
Attention with caches takes fp16 in both, which the CPU and the CUDA provider both compute.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper

from export.attention import CACHED
from export.int8 import Layers, looks_up_rows, node_of, replace_nodes
from export.pieces import SMALL_BYTES
from serve.bundle import Precision

Half = Literal["fp16", "bf16"]
# Products of fp16 whose matrix is one tensor for all, or a tensor for each; or products of float32.
Products = Literal["shared", "own", "float"]
_KINDS = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEAST_ELEMENTS = SMALL_BYTES // 4  # smaller matrices stay inside their graph, as they are


OWN_WEIGHTS = (
    "the steps of {} have weights of their own, which are not written as {}: use --precision int8 "
    "or fp32, on the run"
)


def chooses(step: onnx.ModelProto) -> bool:
    """Whether a graph of one step chooses among the weights of several."""
    return any(node.op_type == "If" for node in step.graph.node)


def half_of(precision: Precision) -> Half | None:
    """The 16-bit type of the weights, if they have one."""
    return precision if precision in ("fp16", "bf16") else None


def to_half(values: npt.NDArray[np.float32], half: Half, name: str = "") -> TensorProto:
    """The nearest 16-bit numbers; ValueError if one is too large for the type."""
    rounded = torch.from_numpy(np.array(values, order="C")).to(_TYPES[half])
    if not bool(rounded.isfinite().all()):
        raise ValueError(
            f"a weight of {np.abs(values).max():.3g} is beyond the numbers of {half}: use "
            f"{'--precision bf16 or ' if half == 'fp16' else ''}--precision fp32"
        )
    tensor = TensorProto(name=name, data_type=_KINDS[half], dims=values.shape)
    tensor.raw_data = rounded.view(torch.int16).numpy().tobytes()
    return tensor


def use_half(model: onnx.ModelProto, half: Half, products: Products) -> None:
    """Give a float32 graph 16-bit matrices, in place; products of bf16 are always of float32."""
    writing = _Halving(model.graph, half, "float" if half == "bf16" else products)
    nodes = [made for node in model.graph.node for made in writing.rewritten(node)]
    replace_nodes(model, nodes, list(writing.made.values()))


class _Halving:
    """One graph, rewritten; a matrix, and a cast of a value, is made once."""

    def __init__(self, graph: onnx.GraphProto, half: Half, products: Products) -> None:
        self.made: dict[str, TensorProto] = {}
        self._half, self._products = half, products
        self._layers = Layers(graph, LEAST_ELEMENTS)
        used = {self._table_of(node) for node in graph.node}
        for tensor in graph.initializer:
            if tensor.name in used:
                name = f"{tensor.name}.{half}"
                self.made[name] = to_half(onnx.numpy_helper.to_array(tensor), half, name)
        self._cast: set[str] = set()
        self._uses: dict[str, int] = {}  # products of a matrix

    def _table_of(self, node: onnx.NodeProto) -> str:
        """The matrix that the node multiplies with or looks rows up in, or ""."""
        layer = self._layers.of(node)
        if layer is not None:
            return layer.weight
        table = node.input[0] if node.op_type == "Gather" and looks_up_rows(node) else ""
        return table if self._layers.knows(table) else ""

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node, or what takes its place."""
        layer = self._layers.of(node)
        if layer is not None and self._products != "float":
            return self._product(layer.x, layer.weight, layer.stands, layer.bias, node.output[0])
        if layer is None and (table := self._table_of(node)):
            (answer,) = node.output
            rows = f"{answer}/{self._half}"
            return [
                node_of("Gather", [f"{table}.{self._half}", node.input[1]], rows, axis=0),
                node_of("Cast", [rows], answer, to=TensorProto.FLOAT),
            ]
        nodes: list[onnx.NodeProto] = []
        for index, name in enumerate(node.input):
            if f"{name}.{self._half}" in self.made:
                node.input[index] = f"{name}.float"
                nodes += self._once(f"{name}.{self._half}", f"{name}.float", TensorProto.FLOAT)
        return [*nodes, node]

    def _product(
        self, x: str, weight: str, stands: bool, bias: str, answer: str
    ) -> list[onnx.NodeProto]:
        """x times the matrix in fp16; the bias is added in float32."""
        nodes = self._once(x, f"{x}/as_fp16", TensorProto.FLOAT16)
        matrix = f"{weight}.fp16"
        uses = self._uses[matrix] = self._uses.get(matrix, 0) + 1
        if self._products == "own" and uses > 1:
            again = TensorProto()
            again.CopyFrom(self.made[matrix])
            again.name = matrix = f"{matrix}.{uses}"
            self.made[matrix] = again
        if stands:
            turned = f"{matrix}.turned"
            if turned not in self._cast:
                self._cast.add(turned)
                nodes.append(node_of("Transpose", [matrix], turned, perm=[1, 0]))
            matrix = turned
        times, wide = f"{answer}/fp16", f"{answer}/times" if bias else answer
        nodes += [
            node_of("MatMul", [f"{x}/as_fp16", matrix], times),
            node_of("Cast", [times], wide, to=TensorProto.FLOAT),
        ]
        return [*nodes, node_of("Add", [wide, bias], answer)] if bias else nodes

    def _once(self, value: str, name: str, kind: int) -> list[onnx.NodeProto]:
        """A cast, unless it was made before."""
        if name in self._cast:
            return []
        self._cast.add(name)
        return [node_of("Cast", [value], name, to=kind)]


_ROTARY = (7, 8)  # of the attention with a cache: cosines and sines


def half_caches(step: onnx.GraphProto) -> None:
    """Have the step of a decoder attend in fp16, with keys and values of fp16, in place."""
    ports = {value.name: value for value in (*step.input, *step.output)}
    nodes: list[Any] = []
    halved: set[str] = set()
    for node in step.node:
        if node.op_type != CACHED:
            nodes.append(node)
            continue
        for place in _ROTARY[: len(node.input) - _ROTARY[0]]:
            table = node.input[place]
            if table:
                node.input[place] = f"{table}/fp16"
            if table and table not in halved:
                halved.add(table)
                nodes.append(node_of("Cast", [table], f"{table}/fp16", to=TensorProto.FLOAT16))
        qkv, answer = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"{answer}/qkv/fp16", f"{answer}/fp16"
        nodes += [
            node_of("Cast", [qkv], node.input[0], to=TensorProto.FLOAT16),
            node,
            helper.make_node(
                "Cast", [node.output[0]], [answer], f"{answer}/float", to=TensorProto.FLOAT
            ),
        ]
        for name in (*node.input[3:5], *node.output[1:3]):
            ports[name].type.tensor_type.elem_type = TensorProto.FLOAT16
    del step.node[:]
    step.node.extend(nodes)
