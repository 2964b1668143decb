"""A graph in the making: pasted copies of traced pieces, constants, sums, named ends.

Knows ONNX nodes and names; not what the pieces compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from export.exporter import OPSET
from export.pieces import Piece
from export.ports import Port
from export.weights import Content, Contents

IR_VERSION = 10
CONTRIB = "com.microsoft"


@dataclass(slots=True)
class GraphBuilder:
    """Nodes and initializers of one graph; every pasted copy gets names of its own."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    _pasted: dict[str, dict[str, str]] = field(default_factory=dict)  # names by owner
    _known: dict[Content, str] = field(default_factory=dict)  # large ones
    # Of large ones, of this graph and of those that share its weights file.
    stored: set[Content] = field(default_factory=set)

    def paste(self, piece: Piece, owner: str, copy: str, inputs: Sequence[str]) -> list[str]:
        """A copy of a piece fed by `inputs`; its outputs. Copies of an owner share weights."""
        if owner not in self._pasted:
            self._pasted[owner] = {
                name: self._add(f"{owner}.{name}", tensor, piece.contents.get(name))
                for name, tensor in piece.initializers.items()
            }
        names = dict(zip(piece.inputs, inputs, strict=True)) | self._pasted[owner]
        for node in piece.nodes:
            pasted = onnx.NodeProto()
            pasted.CopyFrom(node)
            pasted.name = f"{copy}/{node.name}"
            pasted.ClearField("input")
            pasted.input.extend(_renamed(names, value, copy) for value in node.input)
            pasted.ClearField("output")
            pasted.output.extend(_renamed(names, value, copy) for value in node.output)
            del pasted.metadata_props[:]  # the exporter's stack traces
            pasted.ClearField("doc_string")
            self.nodes.append(pasted)
        return [_renamed(names, value, copy) for value in piece.outputs]

    def constant(self, value: float, rank: int = 0) -> str:
        """A number, as a tensor of so many dimensions of one."""
        name = f"constant.{value!r}" + (f".{rank}" if rank else "")
        if name not in self.initializers:
            array = np.full((1,) * rank, value, dtype=np.float32)
            self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def node(self, op: str, inputs: Sequence[str], name: str) -> str:
        """A node of one output; its name."""
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name))
        return name

    def join(self, one: str, other: str, name: str) -> str:
        """Two values side by side along their last dimension."""
        self.nodes.append(helper.make_node("Concat", [one, other], [name], name=name, axis=-1))
        return name

    def halves(self, both: str) -> tuple[str, str]:
        """The two equal parts of a value along its last dimension."""
        parts = f"{both}/first", f"{both}/second"
        split = helper.make_node("Split", [both], parts, f"{both}/split", axis=-1, num_outputs=2)
        self.nodes.append(split)
        return parts

    def by_row(self, rows: str, rank: int) -> str:
        """A number a row (B,), to be multiplied with what has `rank` dimensions."""
        axes = f"axes.{rank}"
        if axes not in self.initializers:
            array = np.arange(1, rank, dtype=np.int64)
            self.initializers[axes] = numpy_helper.from_array(array, axes)
        return self.node("Unsqueeze", [rows, axes], f"{rows}/by_row")

    def combine(self, name: str, x: str | None, terms: list[tuple[float, str]]) -> str:
        """x + sum of weight * value, leaving out what multiplies by 0 or by 1."""
        total = x
        for index, (weight, value) in enumerate(terms):
            if weight == 0:
                continue
            term = value if weight == 1 else self._scaled(f"{name}/{index}", weight, value)
            if total is None:
                total = term
                continue
            total = self.node("Add", [total, term], f"{name}/sum{index}")
        assert total is not None
        return total

    def _scaled(self, name: str, weight: float, value: str) -> str:
        return self.node("Mul", [value, self.constant(weight)], f"{name}/scaled")

    def model(
        self, name: str, inputs: Sequence[Port], outputs: Mapping[str, Port]
    ) -> onnx.ModelProto:
        """The graph as a model; `outputs` by the value that each is to show."""
        self._name_outputs({value: port.name for value, port in outputs.items()})
        graph = helper.make_graph(
            self.nodes,
            name,
            [_value(port) for port in inputs],
            [_value(port) for port in outputs.values()],
            list(self.initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == CONTRIB for node in self.nodes):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="stepdial"
        )

    def _name_outputs(self, names: dict[str, str]) -> None:
        """Rename in place, since an Identity would copy; what no node makes gets one."""
        made = {value for node in self.nodes for value in node.output}
        for value in names.keys() - made:
            self.node("Identity", [value], names[value])
        renamed = {value: name for value, name in names.items() if value in made}
        for node in self.nodes:
            for values in (node.input, node.output):
                for index, value in enumerate(values):
                    values[index] = renamed.get(value, value)

    def _add(self, name: str, tensor: onnx.TensorProto, contents: Contents | None) -> str:
        """The value of a weight: its own, an equal one's, or the transpose of one that is known.

        The exporter writes the weights of a linear layer transposed, so a head that is tied to
        the token embedding would stand in the file twice.
        """
        array = numpy_helper.to_array(tensor)
        if contents is not None:
            if contents.upright in self._known:
                return self._known[contents.upright]
            if contents.turned in self._known:
                return self._transposed(name, self._known[contents.turned])
            if contents.turned in self.stored:
                self._keep(f"{name}.T", array.T)
                return self._transposed(name, f"{name}.T")
            self._known[contents.upright] = name
            self.stored.add(contents.upright)
        self._keep(name, array)
        return name

    def _keep(self, name: str, array: np.ndarray) -> None:
        self.initializers[name] = numpy_helper.from_array(np.array(array, order="C"), name)

    def _transposed(self, name: str, known: str) -> str:
        self.nodes.append(helper.make_node("Transpose", [known], [name], name=name, perm=[1, 0]))
        return name


def _value(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, port.kind, list(port.shape))


def _renamed(names: Mapping[str, str], value: str, copy: str) -> str:
    if not value:
        return ""  # an optional input left out
    return names.get(value, f"{copy}/{value}")
