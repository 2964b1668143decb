"""Weights of pretrained models: bytes in the file, within half a step of their scale."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.int8 import LEAST_TABLE, quantise, table_to_bytes, to_uneven_bytes


@pytest.mark.parametrize("width", [128, 72])
def test_a_large_table_becomes_bytes_and_gives_nearly_the_same_rows(width: int) -> None:
    rows = LEAST_TABLE // width + 1
    table = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    table[5] = 0
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "tokens"], ["x"], name="x")],
        "lookup",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "N"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "N", width])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    quantise(model, plain=True)
    onnx.checker.check_model(model)
    assert model.ByteSize() < 0.3 * table.nbytes
    tokens = np.array([[0, 5, 7], [rows - 1, 9, 5]])
    session = ort.InferenceSession(model.SerializeToString())
    (found,) = session.run(None, {"tokens": tokens})
    assert found.shape == (2, 3, width) and not found[0, 1].any()
    step = np.abs(table).max() / 127
    assert 0 < np.abs(found - table[tokens]).max() <= 0.51 * step


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("width", "size"), [(192, 64), (160, 32), (201, 201), (200, 8)])
def test_weights_that_are_floats_in_memory_round_no_activation(
    width: int, size: int, plain: bool
) -> None:
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((width, 256)).astype(np.float32)  # (K, N)
    weight[0] += 3  # uneven: few are far from the rest
    weight[:, 7] = 0
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], name="y")],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 256])],
        [
            numpy_helper.from_array(weight, "weight"),
            numpy_helper.from_array(np.arange(256, dtype=np.float32), "bias"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    quantise(model, plain, floats=True)
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ByteSize() < (1 + 4 / size) * weight.size + 4000
    data, *halves = to_uneven_bytes(weight.T)
    scales, lows = (half.astype(np.float32) for half in halves)
    assert data.shape == (256, width // size, size)
    known = (data * scales + lows).reshape(256, width).T
    assert not known[:, 7].any()
    span = np.ptp(weight.T.reshape(data.shape), axis=2, keepdims=True)
    step = np.broadcast_to(np.maximum(span, 1e-9) / 255, data.shape).reshape(256, width).T
    assert 0 < (np.abs(known - weight) / step).max() <= 0.51
    x = generator.standard_normal((3, width)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString())
    (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, x @ known + np.arange(256), rtol=1e-4, atol=1e-3)


def test_weights_beyond_scales_of_16_bits_are_refused() -> None:
    weight = np.zeros((2, 64), np.float32)
    for number, makers in (
        (6.5e4, ()),
        (-6.6e4, (to_uneven_bytes,)),
        (1e7, (table_to_bytes,)),
        (-1e8, (to_uneven_bytes, table_to_bytes)),
    ):
        weight[1, 5] = number
        for make in (to_uneven_bytes, table_to_bytes):
            if make in makers:
                with pytest.raises(ValueError, match="a weight is so large that a scale of 16"):
                    make(weight)
            else:
                make(weight)
