"""The graphs of decoders against what the CUDA and TensorRT providers say they compute."""

import dataclasses
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export.half import Half, half_caches, use_half
from export.tensorrt import graph_for, inputs_of
from serve.bundle import AgainstFp32, Bundle, Manifest, read_bundle
from serve.runtime.cache import CacheLayout
from serve.runtime.device import copy_graph, join_graph, jump_graph, pick_graph
from serve.runtime.protocol import Device
from serve.runtime.session import (
    ShapeRange,
    cache_names,
    embed_interface,
    graph_interface,
    head_interface,
    one_profile,
    profiles,
    step_interface,
)
from serve.runtime.tensorrt import Precision
from tests.fixtures.tiny_bundles import build_generate
from tests.onnxruntime_kernels import (
    CONTRIB,
    HEAD_WIDTH_MULTIPLE,
    KERNELS,
    MOST_HEAD_WIDTH,
    unsupported,
)
from tests.tensorrt_operators import unsupported as unsupported_by_tensorrt
from tests.tensorrt_operators import wrong_ranges

ZOO = Path(__file__).parents[2] / "zoo" / "shakespeare"
HALVES = pytest.mark.parametrize("half", ["fp16", "bf16"])
NAMES = {1: "tensor(float)", 6: "tensor(int32)", 7: "tensor(int64)", 10: "tensor(float16)"}


def graphs_of(bundle: Bundle, half: Half | None) -> dict[str, onnx.ModelProto]:
    """All graphs of a decoder, as a bundle of this precision has them."""
    manifest = bundle.manifest
    assert manifest.step is not None
    found = {}
    for path in sorted(bundle.folder.glob("*.onnx")):
        model = onnx.load(str(path))
        if half is not None:
            if path.name == manifest.step.step:
                half_caches(model.graph)
            own = path.name in manifest.step.graphs.values()
            use_half(model, half, "own" if own else "shared")
        found[path.name] = model
    return found


@HALVES
@pytest.mark.parametrize("name", ["zoo", "tiny"])
def test_cuda_has_a_kernel_for_every_node_of_16_bit_decoders(
    tmp_path: Path, half: Half, name: str
) -> None:
    bundle = read_bundle(ZOO) if name == "zoo" else build_generate(tmp_path / "g", steps=(1, 2))
    graphs = graphs_of(bundle, half)
    assert len(graphs) >= 5
    problems = {file: unsupported(model) for file, model in graphs.items()}
    assert not any(problems.values()), problems
    seen = {node.op_type for model in graphs.values() for node in model.graph.node}
    assert {"GroupQueryAttention", "MatMul", "Cast"} <= seen


def test_float32_caches_have_no_kernel_there_which_is_why_they_run_whole_rungs() -> None:
    bundle = read_bundle(ZOO)
    graphs = graphs_of(bundle, None)
    problems = {file: found for file, model in graphs.items() if (found := unsupported(model))}
    step = bundle.manifest.step
    assert step is not None and list(problems) == [step.step]
    assert "attention of FLOAT with caches of FLOAT" in problems[step.step]
    assert not Device("cuda").keeps_caches(bundle.manifest)


@HALVES
def test_bindings_are_those_that_the_kernels_take(half: Half) -> None:
    """Inputs and outputs that are bound have the types of the graphs; `total` is on the host."""
    bundle = read_bundle(ZOO)
    manifest: Manifest = bundle.manifest
    shape = manifest.shape
    assert shape.head_width % HEAD_WIDTH_MULTIPLE == 0 and shape.head_width <= MOST_HEAD_WIDTH
    # Positions are counted in int32, and a cache is as long as the row that needs it.
    assert manifest.text_input.max_tokens < 1 << 31
    graphs, step = graphs_of(bundle, half), manifest.step
    assert step is not None
    against = tuple(
        dataclasses.replace(rung, against_fp32=AgainstFp32(1.0, 0.0, 1)) for rung in manifest.rungs
    )
    rounded = dataclasses.replace(manifest, precision=half, cache="kv_fp16", rungs=against)
    for file, interface in (
        (step.embed, embed_interface(rounded)),
        (step.step, step_interface(rounded)),
        (step.head, head_interface(rounded)),
    ):
        graph = graphs[file].graph
        for nodes, ports in ((interface.inputs, graph.input), (interface.outputs, graph.output)):
            types = {port.name: NAMES[port.type.tensor_type.elem_type] for port in ports}
            assert {name: kind for name, (kind, _) in nodes.items()} == types
    on_host = KERNELS[CONTRIB, "GroupQueryAttention"].on_host
    for node in graphs[step.step].graph.node:
        if node.op_type == "GroupQueryAttention":
            assert [node.input[index] for index in on_host] == ["total"]
            # In place: each cache goes in and out under the name of its buffer.
            assert [f"{name}_out" for name in node.input[3:5]] == list(node.output[1:3])


@pytest.mark.parametrize("joins", [False, True])
def test_caches_are_moved_by_what_cuda_computes(joins: bool) -> None:
    model = onnx.load_from_string(copy_graph(np.dtype(np.float16), joins))
    assert unsupported(model) == []


def test_states_are_moved_by_what_cuda_computes() -> None:
    for kind in (np.float32, np.int64, np.bool_):
        for graph in (pick_graph(np.dtype(kind), 3), join_graph(np.dtype(kind), 3)):
            assert unsupported(onnx.load_from_string(graph)) == []
    assert unsupported(onnx.load_from_string(jump_graph(3))) == []


def test_a_kernel_without_a_last_version_serves_its_first_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pad = dataclasses.replace(KERNELS["", "Pad"], first=18, last=None)
    monkeypatch.setitem(KERNELS, ("", "Pad"), pad)
    model = onnx.load_from_string(copy_graph(np.dtype(np.float16), joins=False))
    assert unsupported(model) == ["Pad of opset 21"]


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("name", ["zoo", "tiny"])
def test_steps_of_decoders_are_what_tensorrt_reads_in_the_shapes_that_are_bound(
    tmp_path: Path, precision: Precision, name: str
) -> None:
    """Operators, types and shape ranges of engines; the range covers all that a row may become."""
    bundle = read_bundle(ZOO) if name == "zoo" else build_generate(tmp_path / "g", steps=(1, 2))
    manifest = bundle.manifest
    assert manifest.step is not None
    for file in manifest.step.graphs.values():
        model = graph_for(bundle, file, precision)
        assert unsupported_by_tensorrt(model) == []
        found = profiles(inputs_of(model, manifest), manifest)
        assert wrong_ranges(model, found) == []
    step = graph_for(bundle, manifest.step.step, precision)
    found = profiles(inputs_of(step, manifest), manifest)
    most, shape = manifest.text_input.max_tokens, manifest.shape
    layout = CacheLayout.of(manifest, manifest.rungs[-1])
    for rows, capacity in ((1, layout.capacity_for(1)), (64, most)):
        wanted = (rows, capacity, shape.heads, shape.head_width)
        assert any(one["k_0_0"].holds(wanted) for one in found)
    kind = TensorProto.FLOAT if precision == "fp32" else TensorProto.FLOAT16
    ports = {port.name: port.type.tensor_type for port in (*step.graph.input, *step.graph.output)}
    for cache in cache_names(1, shape.layers):
        assert ports[cache].elem_type == ports[f"{cache}_out"].elem_type == kind
        sides = [dim.dim_param or dim.dim_value for dim in ports[f"{cache}_out"].shape.dim]
        assert sides == ["batch", "length", shape.heads, shape.head_width]


def test_the_check_of_ranges_finds_what_an_engine_could_not_take() -> None:
    bundle = read_bundle(ZOO)
    step = bundle.manifest.step
    assert step is not None
    model = graph_for(bundle, step.embed, "fp32")
    held = ShapeRange((1,), (1,), (1,))
    assert wrong_ranges(model, [{"tokens": held, "more": held}]) == [
        "past has no range",
        "tokens has 1 dimensions",
        "more is no input",
    ]
    large = ShapeRange((1, 1), (1, 1), (1 << 20, 1 << 20))
    assert wrong_ranges(model, [{"tokens": large, "past": held}]) == [
        f"tokens of {1 << 40} elements"
    ]


@HALVES
def test_the_tensorrt_provider_has_a_range_for_all_inputs_of_whole_rungs(half: Half) -> None:
    bundle = read_bundle(ZOO)
    graphs, manifest = graphs_of(bundle, half), bundle.manifest
    found = one_profile(graph_interface(manifest).inputs, manifest)
    for rung in manifest.rungs:
        assert wrong_ranges(graphs[rung.graph], [found]) == []


@HALVES
def test_whole_rungs_of_16_bits_are_what_tensorrt_reads(half: Half) -> None:
    bundle = read_bundle(ZOO)
    graphs = graphs_of(bundle, half)
    whole = {rung.graph: graphs[rung.graph] for rung in bundle.manifest.rungs}
    problems = {file: unsupported_by_tensorrt(model) for file, model in whole.items()}
    assert len(whole) == 4 and not any(problems.values()), problems


def test_the_check_finds_what_the_provider_would_leave_to_the_cpu() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Det", ["x"], ["y"]),
            helper.make_node("MatMul", ["i", "i"], ["z"]),
            helper.make_node("Shape", ["x"], ["s"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2]),
            helper.make_tensor_value_info("i", TensorProto.INT32, [2, 2]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.INT32, None) for name in ("y", "z")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    assert unsupported(model) == ["MatMul of INT32 as T", "Shape of opset 23", "onnx.Det"]
