"""Products of whole numbers: right, the same in both kinds, rows that stay independent."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from export.graph import stitch, stitch_step
from export.int8 import (
    LARGEST_IN_MATRIX,
    Layers,
    Range,
    Ranges,
    measured_ranges,
    to_integers,
    use_integers,
)
from export.pieces import OPSET
from export.trace import Traced, trace
from train.data.batch import Sizes
from train.model import build_model
from train.recipe import ModelConfig

Floats = npt.NDArray[np.float32]
KINDS = pytest.mark.parametrize("plain", [False, True])
K, N = 200, 333


def drawn(*shape: int) -> Floats:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def layer(matrix: Floats, bias: Floats, form: str = "MatMul") -> onnx.ModelProto:
    """x to y = x times a matrix (N, K), and a bias."""
    arrays = {"w": matrix, "b": bias}
    if form == "Gemm":
        nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
    else:
        arrays["w"] = np.ascontiguousarray(matrix.T)
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["times"]),
            helper.make_node("Add", ["times", "b"], ["y"]),
        ]
    sizes = ["batch"] if form == "Gemm" else ["batch", "length"]
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*sizes, matrix.shape[1]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*sizes, None])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def in_range(model: onnx.ModelProto, low: float, high: float) -> Ranges:
    layers = Layers(model.graph)
    found = (layers.of(node) for node in model.graph.node)
    return {layers.digest(one): Range(low, high) for one in found if one is not None}


def rewritten(model: onnx.ModelProto, ranges: Ranges, plain: bool) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    use_integers(made, ranges, plain)
    onnx.checker.check_model(made, full_check=True)
    return made


def run(model: onnx.ModelProto, **inputs: npt.NDArray[Any]) -> Floats:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    result: Floats = session.run(None, inputs)[0]
    return result


@KINDS
@pytest.mark.parametrize("form", ["MatMul", "Gemm"])
def test_products_are_those_of_the_bytes(form: str, plain: bool) -> None:
    matrix, bias = drawn(N, K), drawn(N)
    model = layer(matrix, bias, form)
    x = drawn(6, K) if form == "Gemm" else drawn(3, 7, K)
    measured = Range(float(x.min()), float(x.max()))
    made = rewritten(model, in_range(model, *measured), plain)
    data, scales = to_integers(matrix)
    scale, zero = measured.scale(), measured.zero()
    rounded = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale  # (..., K)
    assert np.abs(rounded - x).max() <= scale * 1.01
    np.testing.assert_allclose(
        run(made, x=x), rounded @ (data * scales) + bias, rtol=1e-5, atol=1e-4
    )
    contrib = {node.op_type for node in made.graph.node if node.domain}
    assert contrib == (set() if plain else {"MatMulIntegerToFloat"})
    if not plain and form == "MatMul":
        assert [node.op_type for node in made.graph.node if not node.domain] == ["QuantizeLinear"]
    assert {tensor.name for tensor in made.graph.initializer}.isdisjoint({"w"})


@KINDS
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_bytes_do_not_overflow_on_any_processor(sign: int, plain: bool) -> None:
    model = layer(np.full((N, K), sign * 0.5, dtype=np.float32), np.zeros(N, dtype=np.float32))
    made = rewritten(model, in_range(model, 0.0, 2.0), plain)
    x = np.full((1, 5, K), 2.0, dtype=np.float32)
    np.testing.assert_allclose(run(made, x=x), sign * K, rtol=1e-5)
    # Beyond what was measured a number counts as the greatest that was.
    np.testing.assert_array_equal(run(made, x=x * 9), run(made, x=x))


@KINDS
def test_a_row_depends_on_no_other(plain: bool) -> None:
    model = layer(drawn(N, K), drawn(N))
    made = rewritten(model, in_range(model, -4.0, 4.0), plain)
    x = drawn(8, 33, K)
    x[1::2] *= 1000
    together = run(made, x=x)
    for rows, length in ((1, 1), (1, 20), (2, 33), (3, 5)):
        np.testing.assert_array_equal(run(made, x=x[:rows, :length]), together[:rows, :length])


@KINDS
def test_a_layer_that_was_not_measured_stays(plain: bool) -> None:
    model = layer(drawn(N, K), drawn(N))
    assert rewritten(model, {}, plain) == model


def test_zeros_and_nothing_are_exact() -> None:
    assert Range(-1.0, 3.0).zero() == 64 and Range(0.0, 0.0).scale() == 1
    data, scales = to_integers(np.array([[0, 0], [-8, 4]], dtype=np.float32))
    assert data.T.tolist() == [
        [0, 0],
        [-LARGEST_IN_MATRIX, LARGEST_IN_MATRIX // 2],
    ] and scales.tolist() == [1, 0.125]


@pytest.fixture(scope="module")
def traced() -> Traced:
    torch.manual_seed(0)
    config = ModelConfig("encoder", layers=2, heads=4, width=128, hidden=256, window=24)
    model = build_model(config, Sizes(vocabulary=50, classes=3)).eval()
    shapes = ((2, 3), (3, 5))
    small, large = ([torch.ones(shape, dtype=torch.int64)] for shape in shapes)
    return trace(model, small, large)


def test_every_rung_and_the_step_use_the_bytes_that_were_measured(traced: Traced) -> None:
    tokens = np.random.default_rng(0).integers(1, 50, (4, 24))
    tokens[1, 5:] = 0
    rungs = [stitch(traced.graph, "euler", steps) for steps in (1, 3)]
    ranges = measured_ranges(rungs, [tokens[:2], tokens[2:]])
    assert len(ranges) == 2 * 3  # the products of attention's answers are small
    assert all(low < 0 < high for low, high in ranges.values())
    single = measured_ranges(rungs[:1], [tokens])
    assert all(
        ranges[digest].low <= low and high <= ranges[digest].high
        for digest, (low, high) in single.items()
    )
    expected = run(rungs[1], tokens=tokens)
    assert traced.step is not None
    embed, step, head = stitch_step(traced.graph, traced.step, "euler")
    use_integers(rungs[1], ranges, plain=True)
    use_integers(step, ranges, plain=False)
    whole = run(rungs[1], tokens=tokens)
    assert 0 < np.abs(whole - expected).max() < 0.05 * np.abs(expected).max()
    assert bytes_of(step) == bytes_of(rungs[1]) and len(bytes_of(step)) == 6
    session = ort.InferenceSession(embed.SerializeToString())
    x, context = session.run(["x", "context_0"], {"tokens": tokens})
    for _ in range(3):
        h = np.full(len(x), 1 / 3, dtype=np.float32)
        x = run(step, x=x, h=h, context_0=context)
    # Rounding may tip a byte where the two kinds add in another order.
    assert np.abs(run(head, x=x, context_0=context) - whole).max() < 0.02 * np.abs(whole).max()


def bytes_of(model: onnx.ModelProto) -> set[bytes]:
    """The matrices that a graph has as whole numbers."""
    return {
        numpy_helper.to_array(tensor).tobytes()
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.INT8
    }
