"""Rungs: copies of traced evaluations joined into a fixed-step graph by a method's tableau.

Knows ONNX nodes and names, and methods as data; no torch module and no weights file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.parts import KEEP, Parts, Port
from export.pieces import OPSET, Piece
from export.weights import SMALL_BYTES
from train.ode import Method, method_named

IR_VERSION = 10


@dataclass(slots=True)
class _Builder:
    """Nodes and initializers of one graph; every pasted copy gets names of its own."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    _pasted: dict[str, dict[str, str]] = field(default_factory=dict)  # names by owner
    _known: dict[tuple[object, ...], str] = field(default_factory=dict)  # large ones, by content

    def paste(self, piece: Piece, owner: str, copy: str, inputs: Sequence[str]) -> list[str]:
        """A copy of a piece fed by `inputs`; its outputs. Copies of an owner share weights."""
        if owner not in self._pasted:
            self._pasted[owner] = {
                name: self._add(f"{owner}.{name}", tensor)
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

    def constant(self, value: float) -> str:
        name = f"constant.{value!r}"
        if name not in self.initializers:
            scalar = numpy_helper.from_array(np.array(value, dtype=np.float32), name)
            self.initializers[name] = scalar
        return name

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
            joined = f"{name}/sum{index}"
            self.nodes.append(helper.make_node("Add", [total, term], [joined], name=joined))
            total = joined
        assert total is not None
        return total

    def _scaled(self, name: str, weight: float, value: str) -> str:
        scaled = f"{name}/scaled"
        inputs = [value, self.constant(weight)]
        self.nodes.append(helper.make_node("Mul", inputs, [scaled], name=scaled))
        return scaled

    def _add(self, name: str, tensor: onnx.TensorProto) -> str:
        """The value of a weight: its own, an equal one's, or the transpose of one that is known.

        The exporter writes the weights of a linear layer transposed, so a head that is tied to
        the token embedding would stand in the file twice.
        """
        array = numpy_helper.to_array(tensor)
        if array.nbytes >= SMALL_BYTES:
            for turned in (False, True) if array.ndim == 2 else (False,):
                known = self._known.get(_content(array.T if turned else array))
                if known is not None:
                    return self._transposed(name, known) if turned else known
            self._known[_content(array)] = name
        kept = onnx.TensorProto()
        kept.CopyFrom(tensor)
        kept.name = name
        self.initializers[name] = kept
        return name

    def _transposed(self, name: str, known: str) -> str:
        self.nodes.append(helper.make_node("Transpose", [known], [name], name=name, perm=[1, 0]))
        return name


def stitch(parts: Parts, method: str, steps: int) -> onnx.ModelProto:
    """The graph of one rung, checked; its weights still inside."""
    table = method_named(method)
    build = _Builder()
    caches: list[tuple[str, str]] = []  # (input, output) of every key and value
    x, *context = build.paste(parts.embed, "embed", "embed", [port.name for port in parts.inputs])
    for index in range(len(parts.velocities)):
        if parts.depth == "discrete":
            x = _evaluate(build, parts, index, "pass", [x, *context], caches)
        else:
            x = _integrate(build, parts, index, table, steps, x, context, caches)
    inputs = [x, *context] if parts.head_sees_context else [x]
    (answer,) = build.paste(
        parts.head, "head", "head", inputs + ([KEEP.name] if parts.keeps else [])
    )
    return _model(build, parts, answer, caches, f"{method}-{steps}")


def _integrate(
    build: _Builder,
    parts: Parts,
    index: int,
    table: Method,
    steps: int,
    x: str,
    context: list[str],
    caches: list[tuple[str, str]],
) -> str:
    """One velocity across [0, T]; the state at its end."""
    h = parts.T / steps
    before: str | None = None
    for step in range(steps):
        name = f"flow{index}/step{step}"
        stages: list[str] = []
        for stage, (row, c) in enumerate(zip(table.a, table.c, strict=True)):
            terms = [(h * a, v) for a, v in zip(row, stages, strict=True)]
            inputs = [build.combine(f"{name}/at{stage}", x, terms), *context]
            if parts.timed:
                t = parts.T * step / steps + c * h
                inputs += [build.constant(t), build.constant(h)]
            stages.append(_evaluate(build, parts, index, f"{name}/stage{stage}", inputs, caches))
        if table.history and before is not None:
            terms = [(h * (1 + table.history), stages[0]), (-h * table.history, before)]
        else:
            terms = [(h * b, v) for b, v in zip(table.b, stages, strict=True)]
        x = build.combine(name, x, terms)
        before = stages[0]
    return x


def _evaluate(
    build: _Builder,
    parts: Parts,
    index: int,
    name: str,
    inputs: list[str],
    caches: list[tuple[str, str]],
) -> str:
    """The value of a velocity at the inputs; notes the caches that it takes and gives."""
    taken: list[str] = []
    if parts.caches is not None:
        pairs = parts.caches.pairs
        evaluation = len(caches) // (2 * pairs)
        taken = [f"{kind}_{evaluation}_{pair}" for pair in range(pairs) for kind in ("k", "v")]
    v, *given = build.paste(parts.velocities[index], f"velocity{index}", name, inputs + taken)
    caches += zip(taken, given, strict=True)
    return v


def _model(
    build: _Builder, parts: Parts, answer: str, caches: list[tuple[str, str]], name: str
) -> onnx.ModelProto:
    output = parts.output
    named = helper.make_node("Identity", [answer], [output.name], name=output.name)
    build.nodes.append(named)
    inputs = [_value(port) for port in parts.inputs + ((KEEP,) if parts.keeps else ())]
    outputs = [_value(output)]
    if parts.caches is not None:
        size = ("batch", parts.caches.heads, "capacity", parts.caches.head_width)
        renamed: dict[str, str] = {}
        for taken, given in caches:
            inputs.append(_value(Port(taken, TensorProto.FLOAT, size)))
            outputs.append(_value(Port(f"{taken}_out", TensorProto.FLOAT, size)))
            renamed[given] = f"{taken}_out"
        for node in build.nodes:  # rename in place: an Identity would copy the cache
            for index, value in enumerate(node.output):
                node.output[index] = renamed.get(value, value)
    graph = helper.make_graph(build.nodes, name, inputs, outputs, list(build.initializers.values()))
    opsets = [helper.make_opsetid("", OPSET)]
    if any(node.domain == "com.microsoft" for node in build.nodes):
        opsets.append(helper.make_opsetid("com.microsoft", 1))
    model = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="stepdial"
    )
    onnx.checker.check_model(model)
    return model


def _value(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, port.kind, list(port.shape))


def _content(array: np.ndarray) -> tuple[object, ...]:
    data = np.ascontiguousarray(array)
    return data.dtype.str, data.shape, hashlib.sha256(data.data).digest()


def _renamed(names: Mapping[str, str], value: str, copy: str) -> str:
    if not value:
        return ""  # an optional input left out
    return names.get(value, f"{copy}/{value}")
