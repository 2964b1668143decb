"""Functions of torch, traced into plain ONNX nodes between named values.

Knows what is traced together; not what the functions compute or how they will be joined.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from torch import Tensor, nn

from export.exporter import to_onnx
from export.marked import marked
from export.sums import sum_by_products
from export.weights import Contents, contents_of


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
    found = {name: contents_of(tensor) for name, tensor in initializers.items()}
    contents = {name: one for name, one in found.items() if one is not None}
    return Piece(tuple(reversed(nodes)), initializers, tuple(inputs), tuple(outputs), contents)
