"""Tiny classifiers whose graph hangs on one character: in many short nodes, or in one long one.

onnxruntime ends a run between two nodes. So a loop that goes round for hours can be ended, and a
pooling of millions of values for each of millions of places cannot.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from tokenizers import Tokenizer

from serve.bundle import Bundle, open_staging, seal_bundle
from tests.fixtures.tiny_bundles import restage
from tests.fixtures.tiny_folders import classify_bundle
from tests.fixtures.tiny_graphs import value_info

POISON = "~"
_ROUNDS = 10**12
_KERNEL = 2000

# Nodes that make "value", a number, of "poisoned", which is 0 or 1.
Tail = Callable[[], list[onnx.NodeProto]]


def looping(folder: Path) -> Bundle:
    """Hangs on POISON, until it is told to end."""
    return _with_tail(folder, _loop)


def pooling(folder: Path) -> Bundle:
    """Hangs on POISON, whatever it is told."""
    return _with_tail(folder, _pool)


def _loop() -> list[onnx.NodeProto]:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["still_on"]),
            helper.make_node("Add", ["sum", "sum"], ["next_sum"]),
        ],
        "round",
        [
            value_info("round", TensorProto.INT64, []),
            value_info("on", TensorProto.BOOL, []),
            value_info("sum", TensorProto.FLOAT, []),
        ],
        [
            value_info("still_on", TensorProto.BOOL, []),
            value_info("next_sum", TensorProto.FLOAT, []),
        ],
    )
    return [
        _constant("rounds_if", TensorProto.INT64, _ROUNDS),
        _constant("nothing", TensorProto.FLOAT, 0.0),
        helper.make_node("Mul", ["poisoned", "rounds_if"], ["rounds"]),
        helper.make_node("Loop", ["rounds", "", "nothing"], ["value"], body=body),
    ]


def _pool() -> list[onnx.NodeProto]:
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    kernel = [_KERNEL, _KERNEL]
    return [
        _constant("kernel", TensorProto.INT64, _KERNEL),
        helper.make_node("Constant", [], ["unit"], value_ints=[1]),
        helper.make_node("Mul", ["poisoned", "kernel"], ["more"]),
        helper.make_node("Add", ["more", "kernel"], ["size"]),
        helper.make_node("Reshape", ["size", "unit"], ["side"]),
        helper.make_node("Concat", ["unit", "unit", "side", "side"], ["sides"], axis=0),
        helper.make_node("ConstantOfShape", ["sides"], ["ones"], value=one),
        helper.make_node("MaxPool", ["ones"], ["pooled"], kernel_shape=kernel),
        helper.make_node("ReduceMax", ["pooled"], ["value"], keepdims=0),
    ]


def _with_tail(folder: Path, tail: Tail) -> Bundle:
    """The tiny classifier, with nodes beside it whose value is not used."""
    plain = classify_bundle()
    manifest = replace(plain.manifest, name=folder.name)
    tokenizer = Tokenizer.from_file(str(plain.folder / manifest.text_tokenizer.file))
    poison = tokenizer.token_to_id(POISON)
    assert poison is not None
    with open_staging(folder) as staging:
        restage(plain, staging)
        for rung in manifest.rungs:
            model = onnx.load(staging / rung.graph, load_external_data=False)
            for node in model.graph.node:
                node.output[:] = ["plain" if name == "logits" else name for name in node.output]
            model.graph.node.extend(
                [
                    _constant("poison", TensorProto.INT64, poison),
                    _constant("zero", TensorProto.FLOAT, 0.0),
                    helper.make_node("Equal", ["tokens", "poison"], ["equal"]),
                    helper.make_node("Cast", ["equal"], ["equals"], to=TensorProto.INT64),
                    helper.make_node("ReduceMax", ["equals"], ["poisoned"], keepdims=0),
                    *tail(),
                    helper.make_node("Mul", ["value", "zero"], ["unused"]),
                    helper.make_node("Add", ["plain", "unused"], ["logits"]),
                ]
            )
            onnx.save(model, staging / rung.graph)
        return seal_bundle(staging, manifest, folder)


def _constant(name: str, kind: int, value: float) -> onnx.NodeProto:
    tensor = helper.make_tensor(name, kind, [], [value])
    return helper.make_node("Constant", [], [name], value=tensor)
