"""Small ONNX graphs traced from torch modules, ready to be stitched into larger ones."""

import contextlib
import copy
import gc
import hashlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as tracing

from train.blocks import Attention

OPSET = 21
_KNOWN = "2.13."  # the versions of torch whose insides are as below
EXPORTER = "torch.onnx._internal.exporter"


def load_exporter() -> None:
    """Load what takes seconds to load, while something else can be done beside it."""
    with _quiet(), _no_collections():
        import_module("torch.export._trace")
        if _insides_known():
            _forms()


def to_onnx(
    module: nn.Module, arguments: tuple[Tensor, ...], open_sizes: Sequence[Sequence[int]]
) -> onnx.GraphProto:
    """The graph of a call with these tensors as `*inputs`; open sizes are given by dimension."""
    shapes: list[Any] = [dict.fromkeys(open_, torch.export.Dim.DYNAMIC) for open_ in open_sizes]
    with _quiet(), _no_collections():
        by = _by_parts if _insides_known() else _as_a_whole
        model = by(module, arguments, (tuple(shapes),))
    if model.functions:
        raise RuntimeError("the exporter left local functions in the graph; they are not stitched")
    return model.graph


def _insides_known() -> bool:
    return torch.__version__.startswith(_KNOWN)


def _as_a_whole(
    module: nn.Module, arguments: tuple[Tensor, ...], shapes: tuple[Any, ...]
) -> onnx.ModelProto:
    program = torch.onnx.export(
        module, arguments, dynamo=True, dynamic_shapes=shapes, opset_version=OPSET, verbose=False
    )
    assert program is not None
    return program.model_proto


def _by_parts(
    module: nn.Module, arguments: tuple[Tensor, ...], shapes: tuple[Any, ...]
) -> onnx.ModelProto:
    dynamo = import_module("torch._dynamo.config")
    # An example of size 1 stands for any size; torch adds `patch` when it is loaded. To look up
    # what an op gives for open sizes takes longer than to derive it.
    with (
        tracing.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        dynamo.patch(fake_tensor_cache_enabled=False),
    ):
        program = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
        return _translated(program)


def _translated(program: ExportedProgram) -> onnx.ModelProto:
    forms = _forms()
    core, passes = (import_module(f"{EXPORTER}.{name}") for name in ("_core", "_fx_passes"))
    graph = passes.remove_assertion_nodes(program.graph_module)
    if all(forms.is_registered(op) for op in _ops(graph)):
        for each in _graphs(graph):
            _insert_casts(each)
    else:
        program = core._prepare_exported_program_for_export(program, registry=forms)
    made = core._exported_program_to_onnx_program(program, registry=forms)
    made.model = core.onnxscript_apis.convert_version(made.model, OPSET)
    made.optimize()
    model: onnx.ModelProto = made.model_proto
    return model


def _insert_casts(graph: GraphModule) -> None:
    """Where an op takes several types at once; what each node gives is known from its tracing."""
    types = import_module("torch.onnx._internal.fx.passes.type_promotion")
    insertion = types.InsertTypePromotion(graph)
    walk = insertion.interpreter
    computed = walk.run_node

    def known(node: Node) -> Any:
        if node.op != "call_function":
            return computed(node)
        rule = types.get_type_promotion_rule(node, walk.type_promotion_table)
        if rule is not None:
            with walk._set_current_node(node):
                walk._maybe_promote_node(node, rule)
        return node.meta["val"]

    walk.run_node = known
    insertion.run()


def _ops(graph: GraphModule) -> Iterator[Any]:
    """What is called, in the graphs within this one too."""
    for each in _graphs(graph):
        yield from (node.target for node in each.graph.nodes if node.op == "call_function")


def _graphs(graph: GraphModule) -> Iterator[GraphModule]:
    return (each for each in graph.modules() if isinstance(each, GraphModule))


@cache
def _forms() -> Any:
    """The forms that torch's ops have in ONNX; listing them takes most of a second."""
    registration = import_module(f"{EXPORTER}._registration")
    import_module(f"{EXPORTER}._core")
    return registration.ONNXRegistry.from_torchlib(opset_version=OPSET)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that no model here uses, and of its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Python would look for cycles among all objects of the exporter, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Sums and means over positions as products, so that a row's does not depend on its neighbours.
# ONNX Runtime adds up the positions of a single row in another order than those of several rows,
# and then the last bits of an answer depend on its batch. Products it makes row by row.


_REDUCTIONS = ("ReduceSum", "ReduceMean")
_RANK, _AXES = 3, ([1], [-2])  # of x (B, N, D), and of its positions
_AXIS, _ONE_ROW = "positions.axis", "positions.one_row"


def sum_by_products(graph: onnx.GraphProto) -> None:
    """Rewrite, in place, those whose input is known to have three dimensions."""
    known = {each.name: each.type.tensor_type for each in (*graph.input, *graph.value_info)}
    axes = {each.name: each for each in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    found = False
    for node in graph.node:
        if node.op_type in _REDUCTIONS and _is_over_positions(node, known, axes):
            found = True
            nodes += _product(node)
        else:
            nodes.append(node)
    if found:
        del graph.node[:]
        graph.node.extend(nodes)
        for name, value in ((_AXIS, [1]), (_ONE_ROW, [1, 1])):
            graph.initializer.append(numpy_helper.from_array(np.array(value), name))


def _is_over_positions(
    node: onnx.NodeProto,
    known: dict[str, onnx.TypeProto.Tensor],
    constants: dict[str, onnx.TensorProto],
) -> bool:
    x, axes = (*node.input, "")[:2]
    if x not in known or axes not in constants:
        return False
    kind = known[x]
    return (
        kind.elem_type == TensorProto.FLOAT
        and len(kind.shape.dim) == _RANK
        and numpy_helper.to_array(constants[axes]).tolist() in _AXES
    )


def _product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Ones (1, 1, N), or for a mean what they are divided by, times x (B, N, D)."""
    x, (y,) = node.input[0], node.output
    keeps = all(each.i for each in node.attribute if each.name == "keepdims")
    one = numpy_helper.from_array(np.array([1], dtype=np.float32))
    product = y if keeps else f"{y}/product"
    nodes = [
        _node("Shape", [x], f"{y}/count", start=1, end=2),
        _node("Concat", [_ONE_ROW, f"{y}/count"], f"{y}/shape", axis=0),
        _node("ConstantOfShape", [f"{y}/shape"], f"{y}/ones", value=one),
    ]
    weights = f"{y}/ones"
    if node.op_type == "ReduceMean":
        weights = f"{y}/weights"
        nodes += [
            _node("Cast", [f"{y}/count"], f"{y}/divisor", to=TensorProto.FLOAT),
            _node("Div", [f"{y}/ones", f"{y}/divisor"], weights),
        ]
    nodes.append(_node("MatMul", [weights, x], product))  # (B, 1, D)
    if not keeps:
        nodes.append(_node("Squeeze", [product, _AXIS], y))
    return nodes


def _node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)


# One weights file for all graphs of a bundle: equal initializers stand in it once.


SMALL_BYTES = 1024  # smaller tensors stay inside their graph
ALIGNMENT = 4096  # so that a runtime can map a tensor without copying it


Content = tuple[object, ...]


class Contents(NamedTuple):
    """What a large tensor holds, as it stands and transposed: equal ones have equal contents."""

    upright: Content
    turned: Content | None  # of a matrix


def contents_of(tensor: TensorProto) -> Contents | None:
    """Those of a tensor that goes into the file; None of a smaller one."""
    array = numpy_helper.to_array(tensor)
    if array.nbytes < SMALL_BYTES:
        return None
    return Contents(_content(array), _content(array.T) if array.ndim == 2 else None)


def known_contents(tensors: dict[str, TensorProto]) -> dict[str, Contents]:
    """Those of the large ones of these tensors, by name."""
    found = {name: contents_of(tensor) for name, tensor in tensors.items()}
    return {name: one for name, one in found.items() if one is not None}


def _content(array: np.ndarray[Any, Any]) -> Content:
    data = np.ascontiguousarray(array)
    return data.dtype.str, data.shape, hashlib.sha256(data.data).digest()


class WeightsFile:
    """Collects initializers by content, whatever the graphs call them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._offsets: dict[bytes, int] = {}
        self._end = 0

    def externalise(self, model: onnx.ModelProto) -> None:
        """Move the large initializers of a graph into the file."""
        for tensor in model.graph.initializer:
            data = numpy_helper.to_array(tensor).tobytes()
            if len(data) < SMALL_BYTES:
                continue
            offset = self._place(data)
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.ClearField("int64_data")
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.EXTERNAL
            facts = {"location": self.name, "offset": str(offset), "length": str(len(data))}
            for key, value in facts.items():
                tensor.external_data.add(key=key, value=value)

    def write(self, folder: Path) -> None:
        with (folder / self.name).open("wb") as file:
            for data, offset in self._offsets.items():
                file.seek(offset)
                file.write(data)

    def _place(self, data: bytes) -> int:
        if data not in self._offsets:
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._offsets[data] = offset
            self._end = offset + len(data)
        return self._offsets[data]


# Self-attention as one node while a model is traced: the mark of where its form is filled in. So
# a velocity is traced once for all forms, and quickly.


DOMAIN, NAME = "stepdial", "Attention"


class MarkedAttention(nn.Module):
    """An attention whose heart is one node of a graph, which torch cannot run."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attention = self.attention
        qkv = attention.qkv(x)  # (B, N, (H + 2 K) d)
        y = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{NAME}",
            [qkv] if mask is None else [qkv, mask],
            attrs={
                "heads": attention.heads,
                "kv_heads": attention.kv_heads,
                "head_width": attention.head_width,
                "causal": int(attention.causal),
                "rotary": attention.rotary,
                "theta": attention.theta,
                "window": attention.window,
            },
            dtype=torch.float32,
            shape=(*x.shape[:2], attention.heads * attention.head_width),
            version=1,
        )
        out: Tensor = attention.out(y)  # (B, N, D)
        return out


def marked(module: nn.Module) -> nn.Module:
    """A copy with every self-attention as one node; it shares the weights."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return _mark(copy.deepcopy(module, shared))


def _mark(module: nn.Module) -> nn.Module:
    if isinstance(module, Attention):
        return MarkedAttention(module)
    for name, child in module.named_children():
        setattr(module, name, _mark(child))
    return module


# Functions of torch, traced into plain ONNX nodes between named values.


@dataclass(frozen=True, slots=True)
class Piece:
    """A traced function: plain ONNX nodes between named values; initializers by name."""

    nodes: tuple[onnx.NodeProto, ...]
    initializers: dict[str, onnx.TensorProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    contents: dict[str, Contents]  # of the large initializers


@dataclass(frozen=True, slots=True)
class Function:
    """What to trace: a call of `module` on tensors whose open sizes are given by dimension."""

    module: nn.Module
    arguments: tuple[Tensor, ...]
    open_sizes: tuple[tuple[int, ...], ...]  # of each argument


def open_sizes(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The dimensions in which two examples of the same tensors differ."""
    return tuple(
        tuple(i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        for a, b in zip(one, other, strict=True)
    )


def trace_functions(functions: Sequence[Function]) -> list[Piece]:
    """A piece each, its attentions marked.

    They pass the exporter together, since most of its time is its own start.
    """
    sizes = _Sizes([len(function.arguments) for function in functions])
    together = _Together([marked(function.module) for function in functions], sizes)
    graph = to_onnx(
        together.eval(),
        # Copies: the exporter takes a tensor that stands twice for one input.
        tuple(a.clone() for function in functions for a in function.arguments),
        tuple(sizes for function in functions for sizes in function.open_sizes),
    )
    sum_by_products(graph)
    given = [value.name for value in graph.output]
    taken = [value.name for value in graph.input]
    assert len(taken) == sum(sizes.inputs) and len(given) == sum(sizes.outputs)
    pieces = []
    for inputs, outputs in zip(sizes.inputs, sizes.outputs, strict=True):
        pieces.append(_piece(graph, taken[:inputs], given[:outputs]))
        taken, given = taken[inputs:], given[outputs:]
    return pieces


class _Sizes:
    """Inputs and outputs of each function; not kept in a module, which the exporter would reset."""

    def __init__(self, inputs: list[int]) -> None:
        self.inputs = inputs
        self.outputs: list[int] = []


class _Together(nn.Module):
    """Independent functions as one module."""

    def __init__(self, modules: list[nn.Module], sizes: _Sizes) -> None:
        super().__init__()
        self.functions, self.sizes = nn.ModuleList(modules), sizes

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        self.sizes.outputs = []
        for module, count in zip(self.functions, self.sizes.inputs, strict=True):
            out = module(*inputs[:count])
            values = (out,) if isinstance(out, Tensor) else tuple(out)
            made += values
            self.sizes.outputs.append(len(values))
            inputs = inputs[count:]
        return tuple(made)


def _piece(graph: onnx.GraphProto, inputs: list[str], outputs: list[str]) -> Piece:
    """The nodes that the outputs need, in the order of the graph."""
    needed, nodes = set(outputs), list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            nodes.append(node)
            needed.update(node.input)
    initializers = {t.name: t for t in graph.initializer if t.name in needed}
    contents = known_contents(initializers)
    return Piece(tuple(reversed(nodes)), initializers, tuple(inputs), tuple(outputs), contents)


def with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of the branches that they choose from."""
    for node in nodes:
        yield node
        for each in node.attribute:
            yield from with_branches(each.g.node)


# Named inputs and outputs of graphs, with their types and sizes.


INT64, INT32, FLOAT = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
KINDS = {torch.float32: FLOAT, torch.bool: TensorProto.BOOL, torch.int64: INT64, torch.int32: INT32}


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph; a word stands for any size."""

    name: str
    kind: int
    shape: tuple[int | str, ...]


TOKENS = Port("tokens", INT64, ("batch", "length"))
PAST = Port("past", INT32, ("batch",))
KEEP = Port("keep", INT64, ("kept",))
SEQLENS = Port("seqlens", INT32, ("batch",))  # index of the last position of each row
TOTAL = Port("total", INT32, ())
SOURCE = Port("source", INT64, ("batch", "source_length"))
CLASSES = Port("logits", FLOAT, ("batch", "classes"))
LABELS = Port("logits", FLOAT, ("batch", "length", "classes"))
EMBEDDING = Port("embedding", FLOAT, ("batch", "width"))
VOCABULARY = Port("logits", FLOAT, ("batch", "kept", "vocabulary"))


def port_of(name: str, one: Tensor, two: Tensor) -> Port:
    """The port of a value of which two examples are given: the sizes in which they differ vary."""
    words = ("batch", "length" if name == "x" else f"{name}_1")
    shape = tuple(
        size if size == other else words[i] if i < 2 else f"{name}_{i}"
        for i, (size, other) in enumerate(zip(one.shape, two.shape, strict=True))
    )
    return Port(name, KINDS[one.dtype], shape)
