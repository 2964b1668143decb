"""Edits of a graph that leave it an ONNX file: other attributes, shapes, nodes, constants, places.

Knows ONNX as data; whether a runtime still opens the graph is what is to be found out.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

NUMBERS = (-(1 << 40), -2, -1, 0, 1, 2, 3, 7, 64, 1 << 16, 1 << 31, 1 << 62)
PLACES = ("../../../etc/passwd", "/etc/passwd", "manifest.json", "nowhere.bin", "", ".")


def edit_graph(folder: Path, draw: random.Random, others: Sequence[Path]) -> str:
    """One to three edits of one graph."""
    path = draw.choice(sorted(folder.glob("*.onnx")))
    model = onnx.load(str(path), load_external_data=False)
    edits = draw.choices(_EDITS, k=draw.choice((1, 1, 2, 3)))
    done = [edit(model, draw) for edit in edits]
    path.write_bytes(model.SerializeToString())
    return f"{path.name}: {', '.join(done)}"


def _attribute(model: onnx.ModelProto, draw: random.Random) -> str:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return "nothing"
    node = draw.choice(nodes)
    attribute = draw.choice(list(node.attribute))
    name = attribute.name
    if draw.random() < 0.2:
        node.attribute.remove(attribute)
        return f"{node.op_type}.{name} removed"
    new = draw.choice(NUMBERS)
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = new
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = float(new)
    elif attribute.type == onnx.AttributeProto.INTS:
        attribute.ints[:] = [draw.choice(NUMBERS) for _ in attribute.ints]
    else:
        node.attribute.remove(attribute)
        node.attribute.append(helper.make_attribute(name, new))
    return f"{node.op_type}.{name} = {new}"


def _constant(model: onnx.ModelProto, draw: random.Random) -> str:
    """Numbers that steer shapes, slices and lookups."""
    inside = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_location != onnx.TensorProto.EXTERNAL
    ]
    if not inside:
        return "nothing"
    tensor = draw.choice(inside)
    array = numpy_helper.to_array(tensor).copy()
    if array.size:
        with np.errstate(all="ignore"):
            array.reshape(-1)[draw.randrange(array.size)] = np.array(draw.choice(NUMBERS)).astype(
                array.dtype
            )
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"{tensor.name} changed"


def _dims(model: onnx.ModelProto, draw: random.Random) -> str:
    tensors = [tensor for tensor in model.graph.initializer if tensor.dims]
    if not tensors:
        return "nothing"
    tensor = draw.choice(tensors)
    at = draw.randrange(len(tensor.dims))
    tensor.dims[at] = draw.choice((*NUMBERS, tensor.dims[at] + 1, tensor.dims[at] * 2))
    return f"{tensor.name} of another shape"


def _external(model: onnx.ModelProto, draw: random.Random) -> str:
    tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not tensors:
        return "nothing"
    tensor = draw.choice(tensors)
    entry = draw.choice(list(tensor.external_data))
    entry.value = draw.choice(PLACES) if entry.key == "location" else str(draw.choice(NUMBERS))
    return f"{tensor.name}: {entry.key} {entry.value}"


def _type(model: onnx.ModelProto, draw: random.Random) -> str:
    tensor = draw.choice(list(model.graph.initializer))
    tensor.data_type = draw.choice((1, 2, 3, 6, 7, 9, 10, 11, 16, 99))
    return f"{tensor.name} of the type {tensor.data_type}"


def _drop(model: onnx.ModelProto, draw: random.Random) -> str:
    node = draw.choice(list(model.graph.node))
    model.graph.node.remove(node)
    return f"{node.op_type} dropped"


def _operator(model: onnx.ModelProto, draw: random.Random) -> str:
    one, two = (draw.choice(list(model.graph.node)) for _ in range(2))
    was, one.op_type, one.domain = one.op_type, two.op_type, two.domain
    return f"{was} becomes {two.op_type}"


def _wire(model: onnx.ModelProto, draw: random.Random) -> str:
    nodes = [node for node in model.graph.node if node.input]
    node, source = draw.choice(nodes), draw.choice(list(model.graph.node))
    at = draw.randrange(len(node.input))
    known = [value.name for value in (*model.graph.input, *model.graph.initializer)]
    node.input[at] = draw.choice([*source.output, draw.choice(known)])
    return f"{node.op_type} reads {node.input[at]}"


def _port(model: onnx.ModelProto, draw: random.Random) -> str:
    port = draw.choice([*model.graph.input, *model.graph.output])
    sizes = port.type.tensor_type.shape.dim
    if sizes and draw.random() < 0.7:
        size = draw.choice(list(sizes))
        size.ClearField("dim_param")
        size.dim_value = draw.choice(NUMBERS)
    else:
        port.type.tensor_type.elem_type = draw.choice((1, 6, 7, 10, 11))
    return f"{port.name} declared otherwise"


def _version(model: onnx.ModelProto, draw: random.Random) -> str:
    opset = draw.choice(list(model.opset_import))
    opset.version = draw.choice((1, 7, 13, 20, 99, 1 << 40))
    return f"opset {opset.version}"


_EDITS = (
    *(_attribute, _attribute, _constant, _constant, _dims, _external, _type),
    *(_drop, _operator, _wire, _port, _version),
)
