"""Rungs: copies of one traced evaluation joined into a fixed-step graph by a method's tableau.

Knows ONNX nodes and names, and methods as data; no torch module and no weights file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.parts import OPSET, Parts, Piece
from train.ode import method_named

IR_VERSION = 10


@dataclass(slots=True)
class _Builder:
    """Nodes and initializers of one graph; every pasted copy gets names of its own."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def paste(self, piece: Piece, owner: str, copy: str, inputs: Sequence[str]) -> list[str]:
        """A copy of a piece fed by `inputs`; its outputs. Copies of an owner share weights."""
        names = dict(zip(piece.inputs, inputs, strict=True))
        names |= {name: f"{owner}.{name}" for name in piece.initializers}
        for name, tensor in piece.initializers.items():
            if names[name] not in self.initializers:
                kept = onnx.TensorProto()
                kept.CopyFrom(tensor)
                kept.name = names[name]
                self.initializers[kept.name] = kept
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
        constant = f"constant.{weight!r}"
        if constant not in self.initializers:
            scalar = numpy_helper.from_array(np.array(weight, dtype=np.float32), constant)
            self.initializers[constant] = scalar
        scaled = f"{name}/scaled"
        self.nodes.append(helper.make_node("Mul", [value, constant], [scaled], name=scaled))
        return scaled


def stitch(
    parts: Parts, method: str, steps: int, T: float, discrete: bool = False
) -> onnx.ModelProto:
    """The graph of one rung, checked; its weights still inside. A discrete model is x -> f(x)."""
    table, h = method_named(method), T / steps
    build = _Builder()
    generates = parts.task == "generate"
    caches: list[tuple[str, str]] = []  # (input, output) of every key and value
    embedded = build.paste(
        parts.embed, "embed", "embed", ["tokens", "past"] if generates else ["tokens"]
    )
    x, context = embedded[0], embedded[1:]
    before: str | None = None
    for step in range(steps):
        stages: list[str] = []
        for stage, row in enumerate(table.a):
            evaluation = step * table.evaluations + stage
            at = build.combine(
                f"step{step}/at{stage}", x, [(h * a, v) for a, v in zip(row, stages, strict=True)]
            )
            inputs = [at, *context]
            names = _cache_names(evaluation, parts.layers) if generates else []
            out = build.paste(parts.velocity, "velocity", f"evaluation{evaluation}", inputs + names)
            caches += zip(names, out[1:], strict=True)
            stages.append(out[0])
        if discrete:
            x = stages[0]
            break
        if table.history and before is not None:
            terms = [(h * (1 + table.history), stages[0]), (-h * table.history, before)]
        else:
            terms = [(h * b, v) for b, v in zip(table.b, stages, strict=True)]
        x = build.combine(f"step{step}", x, terms)
        before = stages[0]
    head_inputs = [x, "keep"] if generates else [x, *context]
    (logits,) = build.paste(parts.head, "head", "head", head_inputs)
    return _model(build, parts, logits, caches, f"{method}-{steps}")


def _model(
    build: _Builder, parts: Parts, logits: str, caches: list[tuple[str, str]], name: str
) -> onnx.ModelProto:
    def identity(value: str, output: str) -> None:
        build.nodes.append(helper.make_node("Identity", [value], [output], name=output))

    identity(logits, "logits")
    inputs = [_value("tokens", TensorProto.INT64, "batch", "length")]
    outputs = []
    if parts.task == "generate":
        inputs += [
            _value("past", TensorProto.INT32, "batch"),
            _value("keep", TensorProto.INT64, "kept"),
        ]
        outputs.append(_value("logits", TensorProto.FLOAT, "batch", "kept", "vocabulary"))
        size = ("batch", parts.heads, "capacity", parts.head_width)
        renamed: dict[str, str] = {}
        for taken, given in caches:
            inputs.append(_value(taken, TensorProto.FLOAT, *size))
            outputs.append(_value(f"{taken}_out", TensorProto.FLOAT, *size))
            renamed[given] = f"{taken}_out"
        for node in build.nodes:  # rename in place: an Identity would copy the cache
            for index, value in enumerate(node.output):
                node.output[index] = renamed.get(value, value)
    else:
        outputs.append(_value("logits", TensorProto.FLOAT, "batch", "classes"))
    graph = helper.make_graph(build.nodes, name, inputs, outputs, list(build.initializers.values()))
    opsets = [helper.make_opsetid("", OPSET)]
    if any(node.domain == "com.microsoft" for node in build.nodes):
        opsets.append(helper.make_opsetid("com.microsoft", 1))
    model = helper.make_model(
        graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="stepdial"
    )
    onnx.checker.check_model(model)
    return model


def _cache_names(evaluation: int, layers: int) -> list[str]:
    return [f"{kind}_{evaluation}_{layer}" for layer in range(layers) for kind in ("k", "v")]


def _value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _renamed(names: Mapping[str, str], value: str, copy: str) -> str:
    if not value:
        return ""  # an optional input left out
    return names.get(value, f"{copy}/{value}")
