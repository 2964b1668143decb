"""What ONNX Runtime's CUDA provider says it computes, and the check of a graph against it.

Data of docs/OperatorKernels.md of microsoft/onnxruntime at 001d12d: the row of each operator of
ours that serves opset 21, with the types of its parameters. Versions are those that the package
onnxruntime-gpu 1.31.1 registers, some of which that page did not have yet. Which pairs of types
attention with caches has kernels for, and what of it must be on the host, are those registered in
onnxruntime/contrib_ops/cuda/bert/group_query_attention.cc of the same commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

OPSET = 21
CONTRIB = "com.microsoft"
Types = frozenset[int]

_FLOATS: Types = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
_BF16: Types = frozenset({TensorProto.BFLOAT16})
_INTEGERS: Types = frozenset({TensorProto.INT32, TensorProto.INT64})
_BOOL: Types = frozenset({TensorProto.BOOL})
_SMALL: Types = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16})
_NUMBERS = _FLOATS | _BF16 | _INTEGERS | _SMALL
_ALL = _NUMBERS | _BOOL
_INT64: Types = frozenset({TensorProto.INT64})


@dataclass(frozen=True, slots=True)
class Kernel:
    """For which versions of the operator, and for which types of each input and output.

    Without a last version, only for the first: a later one may ask for what the kernel cannot do,
    so that the provider leaves it to the CPU.
    """

    first: int
    last: int | None
    inputs: tuple[str, ...]  # the last stands for all behind it too
    types: Mapping[str, Types]
    outputs: tuple[str, ...] = ("T",)
    on_host: Types = field(default_factory=frozenset)  # inputs, by place

    def serves(self, version: int) -> bool:
        return self.first <= version <= (self.last or self.first)


def _one(first: int, types: Types, inputs: int = 1, last: int | None = None) -> Kernel:
    return Kernel(first, last, ("T",) * inputs, {"T": types})


def _with(first: int, types: Types, other: Types, last: int | None = None) -> Kernel:
    return Kernel(first, last, ("T", "I"), {"T": types, "I": other})


KERNELS: dict[tuple[str, str], Kernel] = {
    ("", "Add"): _one(14, _NUMBERS),
    ("", "Cast"): Kernel(21, 22, ("T",), {"T": _ALL, "T2": _ALL}, ("T2",)),
    ("", "Concat"): _one(13, _ALL),
    ("", "ConstantOfShape"): Kernel(21, 22, ("I",), {"I": _INT64, "T": _ALL}),
    ("", "Div"): _one(14, _NUMBERS),
    ("", "Equal"): Kernel(19, None, ("T",), {"T": _FLOATS | _INTEGERS | _BOOL, "B": _BOOL}, ("B",)),
    ("", "Expand"): _with(13, _ALL, _INT64),
    ("", "Gather"): _with(13, _ALL, _INTEGERS),
    ("", "GatherND"): _with(13, _FLOATS | _BF16 | _BOOL | _INT64, _INT64),
    ("", "Gelu"): _one(20, _FLOATS | _BF16),
    ("", "Identity"): _one(21, _ALL, last=22),
    ("", "LayerNormalization"): _one(17, _FLOATS | _BF16),
    ("", "Less"): Kernel(13, None, ("T",), {"T": _FLOATS | _INTEGERS, "B": _BOOL}, ("B",)),
    ("", "MatMul"): _one(13, _FLOATS | _BF16),
    ("", "Mul"): _one(14, _NUMBERS),
    ("", "Pad"): _with(21, _FLOATS | _BOOL, _INT64, last=22),
    ("", "Range"): _one(
        11, frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT16}) | _INTEGERS
    ),
    ("", "ReduceMax"): _with(20, _FLOATS | _INTEGERS, _INT64),
    ("", "Relu"): _one(14, _FLOATS | _BF16),
    ("", "Reshape"): _with(21, _ALL, _INT64, last=22),
    ("", "Shape"): Kernel(21, 22, ("T",), {"T": _ALL, "I": _INT64}, ("I",)),
    ("", "Slice"): _with(13, _ALL, _INTEGERS),
    ("", "Softmax"): _one(13, _FLOATS | _BF16),
    ("", "Split"): _with(18, _ALL, _INT64),
    ("", "Squeeze"): _with(21, _ALL, _INT64, last=22),
    ("", "Sub"): _one(14, _NUMBERS),
    ("", "Transpose"): _one(21, _ALL, last=22),
    ("", "Trilu"): _with(14, _ALL, _INT64),
    ("", "Unsqueeze"): _with(21, _ALL, _INT64, last=22),
    ("", "Where"): Kernel(
        16,
        None,
        ("B", "T"),
        {"B": _BOOL, "T": _FLOATS | _BF16 | _INTEGERS | frozenset({TensorProto.UINT8})},
    ),
    (CONTRIB, "GroupQueryAttention"): Kernel(
        1,
        None,
        ("T", "T", "T", "C", "C", "M", "M", "T", "T", "P", "T", "T", "S"),
        {
            "T": frozenset({TensorProto.FLOAT16}) | _BF16,
            "C": frozenset({TensorProto.FLOAT16, TensorProto.INT8}) | _BF16,
            "M": frozenset({TensorProto.INT32}),
            "P": _INT64,
            "S": frozenset({TensorProto.FLOAT}),
        },
        ("T", "C", "C"),
        frozenset({6}),
    ),
}
# Queries and caches of attention come in these pairs only.
ATTENTION_PAIRS = frozenset(
    {
        (TensorProto.FLOAT16, TensorProto.FLOAT16),
        (TensorProto.BFLOAT16, TensorProto.BFLOAT16),
        (TensorProto.FLOAT16, TensorProto.INT8),
        (TensorProto.BFLOAT16, TensorProto.INT8),
    }
)
HEAD_WIDTH_MULTIPLE, MOST_HEAD_WIDTH = 8, 256


def unsupported(model: onnx.ModelProto) -> list[str]:
    """The nodes and types that the provider would leave to the CPU, in words."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    kinds = types_of(model)
    problems = []
    for node in model.graph.node:
        kernel = KERNELS.get((node.domain, node.op_type))
        if kernel is None:
            problems.append(f"{node.domain or 'onnx'}.{node.op_type}")
            continue
        if not kernel.serves(version := _version(node, opsets)):
            problems.append(f"{node.op_type} of opset {version}")
        for names, allowed in ((node.input, kernel.inputs), (node.output, kernel.outputs)):
            for index, name in enumerate(names):
                word = allowed[min(index, len(allowed) - 1)]
                if name and kinds[name] not in kernel.types[word]:
                    kind = TensorProto.DataType.Name(kinds[name])
                    problems.append(f"{node.op_type} of {kind} as {word}")
        if node.op_type == "GroupQueryAttention":
            pair = kinds[node.input[0]], kinds[node.input[3]]
            if pair not in ATTENTION_PAIRS:
                names_of = [TensorProto.DataType.Name(kind) for kind in pair]
                problems.append(f"attention of {names_of[0]} with caches of {names_of[1]}")
    return sorted(set(problems))


def _version(node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    """The opset that brought the form of the operator that this node has."""
    if node.domain == CONTRIB:
        return 1
    schema = onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    version: int = schema.since_version
    return version


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The types of all values; those of attention are what goes in."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    graph = whole.graph
    ports = {one.name: one.type.tensor_type.elem_type for one in graph.input}
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            cache = ports[node.input[3]]
            half = TensorProto.FLOAT16
            query = half if node.input[0].endswith("fp16") else TensorProto.FLOAT
            for name, kind in zip(node.output, (query, cache, cache), strict=True):
                if name not in {value.name for value in graph.output}:
                    graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, None))
    found = onnx.shape_inference.infer_shapes(whole).graph
    known = {one.name: one.data_type for one in found.initializer}
    for one in (*found.input, *found.output, *found.value_info):
        known[one.name] = one.type.tensor_type.elem_type
    return known
