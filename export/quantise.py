"""8-bit weights: the large matrices of a graph as bytes, with a scale for every 64 of them.

Symmetric, per output channel and block of 64 inputs, rounded to the nearest: no data is needed,
and the same graph gives the same bytes. A large matrix that MatMul or Gemm multiplies by becomes
bytes. A table that is looked up stays float32: a lookup reads one row, so bytes would save no time
and cost agreement. A head tied to such a table has bytes of its own beside it, which are the same
whether it stands in one graph with the table or alone. Knows ONNX nodes, not models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from serve.bundle import Precision

CONTRIB = "com.microsoft"
BLOCK = 64
ZERO = 128  # the byte of 0.0, as MatMulNBits takes it unless told otherwise
LARGEST = 127  # the farthest a byte is from ZERO, either way
# Smaller matrices fit the fast caches as they are: bytes would cost agreement and save no time.
LEAST_ELEMENTS = 32768
# Activations to 8 bits, a row and block at a time; otherwise it is many times slower than float32.
ACCURACY_LEVEL = 4


def check_precision(word: str) -> Precision:
    """The precision that the word names; ValueError says what there is instead."""
    if word in get_args(Precision):
        return cast(Precision, word)
    if "dynamic" in word.lower():
        raise ValueError(
            f"the precision {word} is not built: it rounds activations with one scale for a whole "
            "tensor, so an answer would depend on the requests that happen to share its batch, and "
            "a decoder's token on the tokens after it. Choose int8: 8-bit weights, with a scale "
            "for every 64 activations of one position, so that rows stay independent"
        )
    raise ValueError(f"unknown precision {word}: choose one of {', '.join(get_args(Precision))}")


def quantise(model: onnx.ModelProto, plain: bool) -> None:
    """Give a float32 graph of opset 21 or later 8-bit weights, in place.

    Plain, bytes pass DequantizeLinear into a float32 product, for any runtime. Otherwise products
    become MatMulNBits of ONNX Runtime. The bytes and the scales are the same.
    """
    graph = model.graph
    quantising = _Quantising(graph, plain)
    nodes = [made for node in graph.node for made in quantising.rewritten(node)]
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):  # without the transposes that only products used
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            kept.append(node)
    tensors = [*graph.initializer, *quantising.made.values()]
    initializers = [tensor for tensor in tensors if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(initializers)
    domains = {opset.domain for opset in model.opset_import}
    if CONTRIB not in domains and any(node.domain == CONTRIB for node in kept):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))


def to_bytes(matrix: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Bytes (N, blocks, 64) and scales (N, blocks) of a matrix (N, K), the last block filled up."""
    N, K = matrix.shape
    blocks = -(-K // BLOCK)
    padded = np.zeros((N, blocks * BLOCK), dtype=np.float32)
    padded[:, :K] = matrix
    blocked = padded.reshape(N, blocks, BLOCK)
    scales = np.abs(blocked).max(axis=2) / np.float32(LARGEST)  # (N, blocks)
    scales[scales < np.finfo(np.float32).tiny] = 1  # no number of use, or none but 0
    return (np.rint(blocked / scales[:, :, None]) + ZERO).astype(np.uint8), scales


@dataclass(frozen=True, slots=True)
class _Product:
    """x times a large matrix, which stands (N, K) as its bytes will, or else (K, N)."""

    x: str
    weight: str
    stands: bool
    bias: str


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix (N, K) that has become NAME.bytes, NAME.scales and, where plain, NAME.zeros."""

    name: str
    N: int
    K: int


class _Quantising:
    """The products of one graph, rewritten; a matrix that many of them use is made once."""

    def __init__(self, graph: onnx.GraphProto, plain: bool) -> None:
        self.plain = plain
        self.made: dict[str, onnx.TensorProto] = {}
        self._matrices: dict[tuple[str, bool], _Matrix] = {}
        self._large = {
            tensor.name: tensor
            for tensor in graph.initializer
            if tensor.data_type == TensorProto.FLOAT
            and len(tensor.dims) == 2
            and tensor.dims[0] * tensor.dims[1] >= LEAST_ELEMENTS
        }
        self._transposed = {
            node.output[0]: node.input[0]
            for node in graph.node
            if node.op_type == "Transpose"
            and node.input[0] in self._large
            and _attributes(node).get("perm", [1, 0]) == [1, 0]
        }

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node, or what takes its place."""
        product = self._product(node)
        if product is None:
            return [node]
        key = product.weight, product.stands
        nodes: list[onnx.NodeProto] = []
        if key not in self._matrices:
            self._matrices[key] = self._in_bytes(*key)
            if self.plain:
                nodes += self._dequantised(self._matrices[key])
        matrix, (answer,) = self._matrices[key], node.output
        times = f"{answer}/times" if product.bias else answer
        if self.plain:
            nodes.append(node_of("MatMul", [product.x, matrix.name], times))
        else:
            nodes.append(_times_bytes(product.x, matrix, times))
        if product.bias:
            nodes.append(node_of("Add", [times, product.bias], answer))
        return nodes

    def _product(self, node: onnx.NodeProto) -> _Product | None:
        """What the node multiplies, if it is a layer as torch's exporter writes one."""
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            return None
        facts = _attributes(node)
        if facts.get("transA", 0) or facts.get("alpha", 1) != 1 or facts.get("beta", 1) != 1:
            return None
        x, weight, bias = (*node.input, "")[:3]
        stands = bool(facts.get("transB", 0))
        if weight in self._transposed:
            weight, stands = self._transposed[weight], not stands
        return _Product(x, weight, stands, bias) if weight in self._large else None

    def _in_bytes(self, weight: str, stands: bool) -> _Matrix:
        values = numpy_helper.to_array(self._large[weight])
        values = values if stands else values.T  # (N, K)
        data, scales = to_bytes(values)
        matrix = _Matrix(f"{weight}.{'rows' if stands else 'columns'}", *values.shape)
        self._make(f"{matrix.name}.bytes", data.reshape(len(data), -1) if self.plain else data)
        self._make(f"{matrix.name}.scales", scales)
        return matrix

    def _dequantised(self, matrix: _Matrix) -> list[onnx.NodeProto]:
        """The matrix as a value (K, N) of its own name, by standard operators."""
        name = matrix.name
        zeros = np.full((matrix.N, -(-matrix.K // BLOCK)), ZERO, dtype=np.uint8)
        self._make(f"{name}.zeros", zeros)
        value = f"{name}/padded"
        inputs = [f"{name}.{part}" for part in ("bytes", "scales", "zeros")]
        nodes = [node_of("DequantizeLinear", inputs, value, axis=1, block_size=BLOCK)]
        if matrix.K % BLOCK:
            bounds = {f"{name}.from": 0, f"{name}.to": matrix.K, f"{name}.axis": 1}
            for bound, at in bounds.items():
                self._make(bound, np.array([at], dtype=np.int64))
            nodes.append(node_of("Slice", [value, *bounds], f"{name}/cut"))
            value = f"{name}/cut"
        return [*nodes, node_of("Transpose", [value], name, perm=[1, 0])]

    def _make(self, name: str, array: npt.NDArray[Any]) -> None:
        self.made[name] = numpy_helper.from_array(array, name)


def _times_bytes(x: str, matrix: _Matrix, answer: str) -> onnx.NodeProto:
    inputs = [x, f"{matrix.name}.bytes", f"{matrix.name}.scales"]
    return node_of(
        "MatMulNBits",
        inputs,
        answer,
        domain=CONTRIB,
        K=matrix.K,
        N=matrix.N,
        bits=8,
        block_size=BLOCK,
        accuracy_level=ACCURACY_LEVEL,
    )


def node_of(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}
