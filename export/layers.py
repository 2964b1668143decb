"""The layers of a graph: products with a large matrix, as torch's exporter writes them.

Finds them and puts others in their place. Knows ONNX nodes; neither models nor what a matrix
becomes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

CONTRIB = "com.microsoft"
# Smaller matrices fit the fast caches as they are: bytes would cost agreement and save no time.
LEAST_ELEMENTS = 32768


@dataclass(frozen=True, slots=True)
class Layer:
    """x times a large matrix, which stands (N, K), or else (K, N)."""

    x: str
    weight: str
    stands: bool
    bias: str


NOTHING_LARGE = (
    f"no matrix that it multiplies by has {LEAST_ELEMENTS:,} numbers or more, so all weights stay "
    "float32: 8 bits save nothing in a model this small, and --precision fp32 is the same bundle"
)


class Layers:
    """Which nodes of a graph are layers, and their matrices."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
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

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return bool(self._large) and any(self.of(node) for node in self._graph.node)

    def of(self, node: onnx.NodeProto) -> Layer | None:
        """What the node multiplies, if it is a layer."""
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            return None
        facts = _attributes(node)
        if facts.get("transA", 0) or facts.get("alpha", 1) != 1 or facts.get("beta", 1) != 1:
            return None
        x, weight, bias = (*node.input, "")[:3]
        stands = bool(facts.get("transB", 0))
        if weight in self._transposed:
            weight, stands = self._transposed[weight], not stands
        return Layer(x, weight, stands, bias) if weight in self._large else None

    def matrix(self, layer: Layer) -> npt.NDArray[np.float32]:
        """Its matrix (N, K)."""
        values = numpy_helper.to_array(self._large[layer.weight])
        return values if layer.stands else values.T

    def digest(self, layer: Layer) -> str:
        """The same for equal matrices, whatever their graphs call them and how they stand."""
        matrix = np.ascontiguousarray(self.matrix(layer))
        return f"{matrix.shape} {hashlib.sha256(matrix.data).hexdigest()}"


def replace_nodes(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], made: Sequence[TensorProto]
) -> None:
    """Give a graph these nodes and more tensors, in place, without what is then used by none."""
    graph = model.graph
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            kept.append(node)
    initializers = [tensor for tensor in (*graph.initializer, *made) if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(initializers)
    domains = {opset.domain for opset in model.opset_import}
    if CONTRIB not in domains and any(node.domain == CONTRIB for node in kept):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))


def node_of(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node of one output, by whose name it goes."""
    return helper.make_node(op, inputs, [output], name=output, **attributes)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}
