"""The operators that TensorRT's ONNX parser says it supports, and the check of a graph against it.

Data of docs/operators.md of onnx/onnx-tensorrt at 10.1-GA: the rows that say Y of the operators
that graphs of ours have, and the restrictions on them. TensorRT 11 reads opsets 9 to 25.
"""

import onnx

MAX_OPSET = 25
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
