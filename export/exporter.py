"""Torch's exporter: a module becomes a graph of plain ONNX nodes.

Its parts are called one by one. As a whole it traces every module a second time, to take apart
those ops that have no form in ONNX; but most modules have none, and then that is left out. So this
leans on the insides of the one version of torch that is asked for; any other is called as a whole.
Knows nothing of what a module computes or of how graphs will be joined.
"""

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental import _config as tracing

OPSET = 21
_KNOWN = "2.13."  # the versions of torch whose insides are as below
_EXPORTER = "torch.onnx._internal.exporter"


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
    # An example of size 1 stands for any size; torch adds `patch` when it is loaded.
    with tracing.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
    return _translated(program)


def _translated(program: ExportedProgram) -> onnx.ModelProto:
    forms = _forms()
    core, passes = (import_module(f"{_EXPORTER}.{name}") for name in ("_core", "_fx_passes"))
    graph = passes.remove_assertion_nodes(program.graph_module)
    if all(forms.is_registered(op) for op in _ops(graph)):
        passes.insert_type_promotion_nodes(graph)
    else:
        program = core._prepare_exported_program_for_export(program, registry=forms)
    made = core._exported_program_to_onnx_program(program, registry=forms)
    made.model = core.onnxscript_apis.convert_version(made.model, OPSET)
    made.optimize()
    model: onnx.ModelProto = made.model_proto
    return model


def _ops(graph: GraphModule) -> Iterator[Any]:
    """What is called, in the graphs within this one too."""
    for each in graph.modules():
        if isinstance(each, GraphModule):
            yield from (node.target for node in each.graph.nodes if node.op == "call_function")


@cache
def _forms() -> Any:
    """The forms that torch's ops have in ONNX; listing them takes most of a second."""
    registration = import_module(f"{_EXPORTER}._registration")
    import_module(f"{_EXPORTER}._core")
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
