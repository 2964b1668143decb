"""8-bit weights: the large matrices of a graph as bytes, with a scale for every 64 of them.

Symmetric, per output channel and block of 64 inputs, rounded to the nearest: no data is needed,
and the same graph gives the same bytes. A large matrix that MatMul or Gemm multiplies by becomes
bytes. A table that is looked up becomes bytes with a scale for each row if it is so large that it
is most of the file, as those of pretrained models are; a smaller one stays float32: a lookup reads
one row, so bytes would save no time. A head tied to a table has bytes of its own beside it, which
are the same whether it stands in one graph with the table or alone. Layers of a classifier are
whole numbers instead, if they were measured. Knows ONNX nodes, not models.
"""

from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from export.layers import CONTRIB, Layer, Layers, node_of, replace_nodes
from serve.bundle import Precision

BLOCK = 64
ZERO = 128  # the byte of 0.0, as MatMulNBits takes it unless told otherwise
LARGEST = 127  # the farthest a byte is from ZERO, either way
LEAST_TABLE = 1 << 21  # numbers of a table that becomes bytes: 8 MB as float32
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
    quantising = _Quantising(model.graph, plain)
    nodes = [made for node in model.graph.node for made in quantising.rewritten(node)]
    replace_nodes(model, nodes, list(quantising.made.values()))


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


def table_to_bytes(
    table: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Bytes (V, D) and scales (V, 1) of a table."""
    scales = np.abs(table).max(axis=1, keepdims=True) / np.float32(LARGEST)  # (V, 1)
    scales[scales < np.finfo(np.float32).tiny] = 1  # no number of use, or none but 0
    return np.rint(table / scales).astype(np.int8), scales


def _looks_up_rows(node: onnx.NodeProto) -> bool:
    return all(each.i == 0 for each in node.attribute if each.name == "axis")


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
        self._layers = Layers(graph)
        self._tables = {
            tensor.name: tensor
            for tensor in graph.initializer
            if tensor.data_type == onnx.TensorProto.FLOAT
            and len(tensor.dims) == 2
            and tensor.dims[0] * tensor.dims[1] >= LEAST_TABLE
        }

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node, or what takes its place."""
        if node.op_type == "Gather" and node.input[0] in self._tables and _looks_up_rows(node):
            return self._looked_up(node)
        layer = self._layers.of(node)
        if layer is None:
            return [node]
        key = layer.weight, layer.stands
        nodes: list[onnx.NodeProto] = []
        if key not in self._matrices:
            self._matrices[key] = self._in_bytes(layer)
            if self.plain:
                nodes += self._dequantised(self._matrices[key])
        matrix, (answer,) = self._matrices[key], node.output
        times = f"{answer}/times" if layer.bias else answer
        if self.plain:
            nodes.append(node_of("MatMul", [layer.x, matrix.name], times))
        else:
            nodes.append(_times_bytes(layer.x, matrix, times))
        if layer.bias:
            nodes.append(node_of("Add", [times, layer.bias], answer))
        return nodes

    def _looked_up(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Rows of bytes, each times its scale."""
        table, index = node.input
        name, (answer,) = f"{table}.table", node.output
        if f"{name}.bytes" not in self.made:
            data, scales = table_to_bytes(numpy_helper.to_array(self._tables[table]))
            self._make(f"{name}.bytes", data)
            self._make(f"{name}.scales", scales)
        rows, wide, scales_of = f"{answer}/bytes", f"{answer}/wide", f"{answer}/scales"
        return [
            node_of("Gather", [f"{name}.bytes", index], rows),
            node_of("Cast", [rows], wide, to=onnx.TensorProto.FLOAT),
            node_of("Gather", [f"{name}.scales", index], scales_of),
            node_of("Mul", [wide, scales_of], answer),
        ]

    def _in_bytes(self, layer: Layer) -> _Matrix:
        values = self._layers.matrix(layer)  # (N, K)
        data, scales = to_bytes(values)
        matrix = _Matrix(f"{layer.weight}.{'rows' if layer.stands else 'columns'}", *values.shape)
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
