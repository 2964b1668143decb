"""The operators that TensorRT's ONNX parser says it supports, and the check of a graph against it.

Data of docs/operators.md of onnx/onnx-tensorrt at c727277, the parser of TensorRT 10.14: opsets,
the rows that say Y of the operators that graphs of ours have, and the restrictions on them. Limits
of shapes are those of TensorRT's Dims, whose tensors have fewer than 2^31 elements.
"""

import math
from collections.abc import Sequence

import onnx

from serve.runtime.session import Profile

MAX_OPSET = 24
# fmt: off
SUPPORTED = frozenset({
    "Add", "And", "Cast", "Clip", "Concat", "Constant", "ConstantOfShape", "Cos", "CumSum",
    "Div", "Einsum", "Equal", "Erf", "Exp", "Expand", "Gather", "GatherElements", "GatherND",
    "Gelu", "Gemm", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN",
    "LayerNormalization", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Mean", "Min", "Mod",
    "Mul", "Neg", "Not", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceSum", "Relu", "Reshape", "ScatterElements", "ScatterND", "Shape",
    "Sigmoid", "Sign", "Sin", "Slice", "Softmax", "Softplus", "Split", "Sqrt", "Squeeze", "Sub",
    "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
})
# fmt: on
# Operators whose axes must be known when the engine is built, and the input that holds them.
_STATIC_AXES = {
    "ReduceMax": 1,
    "ReduceMean": 1,
    "ReduceMin": 1,
    "ReduceSum": 1,
    "Slice": 3,
    "Squeeze": 1,
    "Unsqueeze": 1,
    "CumSum": 1,
}


def unsupported(model: onnx.ModelProto) -> list[str]:
    """What the parser would not take, in words."""
    problems = [
        f"opset {entry.version} of {entry.domain or 'onnx'}"
        for entry in model.opset_import
        if entry.domain in ("", "ai.onnx") and not 9 <= entry.version <= MAX_OPSET
    ]
    known = {one.name for one in model.graph.initializer}
    known |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in SUPPORTED:
            problems.append(f"{node.domain or 'onnx'}.{node.op_type}")
        elif node.op_type == "LayerNormalization" and any(node.output[1:]):
            problems.append("LayerNormalization with more than its first output")
        else:
            axes = list(node.input[_STATIC_AXES.get(node.op_type, len(node.input)) :][:1])
            if any(name and name not in known for name in axes):
                problems.append(f"{node.op_type} with computed axes")
    problems += [
        f"the constant {one.name} of {onnx.TensorProto.DataType.Name(one.data_type)}"
        for one in model.graph.initializer
        if one.data_type not in _TYPES
    ]
    return sorted(set(problems))


_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
        onnx.TensorProto.INT32,
        onnx.TensorProto.INT64,
        onnx.TensorProto.BOOL,
    }
)

MOST_DIMENSIONS, MOST_ELEMENTS = 8, (1 << 31) - 1


def wrong_ranges(model: onnx.ModelProto, profiles: Sequence[Profile]) -> list[str]:
    """What is wrong with the shape ranges that an engine of this graph is built for, in words."""
    problems = []
    for port in model.graph.input:
        tensor = port.type.tensor_type
        if tensor.elem_type not in _TYPES:
            problems.append(f"{port.name} of {onnx.TensorProto.DataType.Name(tensor.elem_type)}")
        fixed = [dim.dim_value or None for dim in tensor.shape.dim]
        for profile in profiles:
            if port.name not in profile:
                problems.append(f"{port.name} has no range")
                continue
            bounds = profile[port.name]
            sides = list(zip(bounds.min, bounds.opt, bounds.max, strict=True))
            if len(sides) != len(fixed) or len(sides) > MOST_DIMENSIONS:
                problems.append(f"{port.name} has {len(sides)} dimensions")
            elif not all(
                1 <= low <= usual <= high and size in (None, low)
                for (low, usual, high), size in zip(sides, fixed, strict=True)
            ):
                problems.append(f"{port.name} from {bounds.min} to {bounds.max}")
            if math.prod(bounds.max) > MOST_ELEMENTS:
                problems.append(f"{port.name} of {math.prod(bounds.max)} elements")
    unknown = {name for profile in profiles for name in profile}
    unknown -= {port.name for port in model.graph.input}
    return sorted(problems) + sorted(f"{name} is no input" for name in unknown)
