"""Large tables that are looked up: as bytes, within half a step of their scale."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.int8 import LEAST_TABLE, quantise


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
