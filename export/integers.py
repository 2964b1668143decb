"""8-bit products of whole numbers: what a classifier of fewer bits multiplies.

A matrix becomes bytes with a scale for each output. What it multiplies becomes bytes by one scale
and one zero, measured once and the same for ever: so an answer depends on no other row of its
batch. Bytes of a matrix use half their range: processors without instructions of their own for
8 bits add two products in 16 bits, which 2 * 255 * 64 fits and 2 * 255 * 127 does not. Knows ONNX
nodes and ranges; not what was measured, nor models.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from export.layers import CONTRIB, Layer, Layers, node_of, replace_nodes

LARGEST = 64  # the farthest a byte of a matrix is from 0
LEVELS = 255


class Range(NamedTuple):
    """The least and the greatest of what a layer multiplies, with 0 between them."""

    low: float
    high: float

    def scale(self) -> np.float32:
        scale = np.float32((self.high - self.low) / LEVELS)
        return scale if scale >= np.finfo(np.float32).tiny else np.float32(1)

    def zero(self) -> np.uint8:
        """The byte of 0."""
        return np.uint8(np.rint(-self.low / self.scale()))


Ranges = Mapping[str, Range]  # by the digest of the matrix


def use_integers(model: onnx.ModelProto, ranges: Ranges, plain: bool) -> None:
    """Give the layers whose range is known products of bytes, in place; others stay as they are.

    Plain, as QuantizeLinear and DequantizeLinear around float32 products, which runtimes know how
    to join. Otherwise as ONNX Runtime's operator, which adds the bias too. The bytes are the same.
    """
    writing = _Writing(model.graph, ranges, plain)
    nodes = [made for node in model.graph.node for made in writing.rewritten(node)]
    replace_nodes(model, nodes, list(writing.made.values()))


class _Writing:
    """The layers of one graph, rewritten; a matrix that many of them use is made once."""

    def __init__(self, graph: onnx.GraphProto, ranges: Ranges, plain: bool) -> None:
        self.plain = plain
        self.made: dict[str, onnx.TensorProto] = {}
        self._ranges, self._layers = ranges, Layers(graph)
        self._known: dict[tuple[str, bool], str | None] = {}  # the matrix in bytes
        self._sums = {} if plain else _sums(graph)
        self._left_out: set[str] = set()  # sums that a product makes

    def rewritten(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node, or what takes its place."""
        if node.output and node.output[0] in self._left_out:
            return []
        layer = self._layers.of(node)
        if layer is None:
            return [node]
        nodes: list[onnx.NodeProto] = []
        key = layer.weight, layer.stands
        if key not in self._known:
            self._known[key] = self._in_bytes(layer)
            if self.plain and (name := self._known[key]) is not None:
                parts = [f"{name}.bytes", f"{name}.scales"]
                nodes.append(node_of("DequantizeLinear", parts, name, axis=1))
        matrix = self._known[key]
        if matrix is None:
            return [node]
        write = self._plain if self.plain else self._fused
        return nodes + write(layer, matrix, node.output[0])

    def _plain(self, layer: Layer, matrix: str, answer: str) -> list[onnx.NodeProto]:
        around = [f"{matrix}.scale", f"{matrix}.zero"]
        x, times = f"{answer}/x", f"{answer}/times" if layer.bias else answer
        nodes = [
            node_of("QuantizeLinear", [layer.x, *around], f"{x}/bytes"),
            node_of("DequantizeLinear", [f"{x}/bytes", *around], x),
            node_of("MatMul", [x, matrix], times),
        ]
        return [*nodes, node_of("Add", [times, layer.bias], answer)] if layer.bias else nodes

    def _fused(self, layer: Layer, matrix: str, answer: str) -> list[onnx.NodeProto]:
        bias = layer.bias
        if not bias and answer in self._sums:
            answer, bias = self._sums[answer]
            self._left_out.add(answer)
        x, scale, zero = f"{answer}/bytes", f"{matrix}.scale", f"{matrix}.zero"
        inputs = [x, f"{matrix}.bytes", scale, f"{matrix}.scales", zero, "", bias]
        return [
            node_of("QuantizeLinear", [layer.x, scale, zero], x),
            node_of("MatMulIntegerToFloat", inputs, answer, domain=CONTRIB),
        ]

    def _in_bytes(self, layer: Layer) -> str | None:
        measured = self._ranges.get(self._layers.digest(layer))
        if measured is None:
            return None
        name = f"{layer.weight}.{'rows' if layer.stands else 'columns'}"
        data, scales = to_integers(self._layers.matrix(layer))
        self._make(f"{name}.bytes", data)
        self._make(f"{name}.scales", scales)
        self._make(f"{name}.scale", np.array(measured.scale()))
        self._make(f"{name}.zero", np.array(measured.zero()))
        return name

    def _make(self, name: str, array: npt.NDArray[Any]) -> None:
        self.made[name] = numpy_helper.from_array(array, name)


def to_integers(
    matrix: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Bytes (K, N) and scales (N,) of a matrix (N, K)."""
    scales = np.abs(matrix).max(axis=1) / np.float32(LARGEST)  # (N,)
    scales[scales < np.finfo(np.float32).tiny] = 1  # no number of use, or none but 0
    return np.ascontiguousarray(np.rint(matrix / scales[:, None]).astype(np.int8).T), scales


def _sums(graph: onnx.GraphProto) -> dict[str, tuple[str, str]]:
    """Of values to which only a bias is added: the sum, and the bias."""
    biases = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 1}
    uses: dict[str, int] = {value.name: 1 for value in graph.output}
    for node in graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    sums = {}
    for node in graph.node:
        if node.op_type == "Add" and not biases.isdisjoint(node.input):
            value, bias = sorted(node.input, key=biases.__contains__)
            if uses[value] == 1:
                sums[value] = node.output[0], bias
    return sums
