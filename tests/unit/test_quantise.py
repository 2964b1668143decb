"""8-bit weights: right products, rows that stay independent, the same bytes in both kinds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from export.graph import stitch, stitch_step
from export.int8 import BLOCK, LEAST_ELEMENTS, check_precision, quantise, to_bytes
from export.pieces import OPSET, WeightsFile
from export.trace import trace
from train.data.batch import Sizes
from train.model import build_model
from train.recipe import ModelConfig

Floats = npt.NDArray[np.float32]
KINDS = pytest.mark.parametrize("plain", [False, True])


def drawn(*shape: int) -> Floats:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def product_graph(
    nodes: Sequence[NodeProto], rank: int, K: int, **arrays: Floats
) -> onnx.ModelProto:
    """x, of one open size a dimension but the last, to y."""
    sizes = ["batch", "length"][: rank - 1]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*sizes, K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*sizes, None])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def matmul(K: int, N: int) -> onnx.ModelProto:
    return product_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], 3, K, w=drawn(K, N))


def gemm(K: int, N: int) -> onnx.ModelProto:
    """As torch's exporter writes a linear layer of rows."""
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=1.0, beta=1.0, transB=1)
    return product_graph([node], 2, K, w=drawn(N, K), b=drawn(N))


def quantised(model: onnx.ModelProto, plain: bool) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    quantise(made, plain)
    onnx.checker.check_model(made, full_check=True)
    return made


def run(model: onnx.ModelProto, x: Floats) -> Floats:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    (answer,) = session.run(None, {"x": x})
    result: Floats = answer
    return result


def arrays_of(model: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def dequantised(model: onnx.ModelProto, K: int) -> Floats:
    """The matrix (N, K) that the only bytes of a graph stand for."""
    arrays = arrays_of(model)
    (name,) = (name for name in arrays if name.endswith(".bytes"))
    data, scales = arrays[name], arrays[name.replace(".bytes", ".scales")]
    blocked = data.reshape(*scales.shape, BLOCK).astype(np.float32) - 128
    values: Floats = (blocked * scales[:, :, None]).reshape(len(data), -1)[:, :K]
    return values


def rounding_bound(x: Floats, matrix: Floats) -> Floats:
    """How far a product may move when each block of 64 activations is rounded to 8 bits."""
    lost = np.zeros((*x.shape[:-1], len(matrix)), dtype=np.float32)
    for at in range(0, x.shape[-1], BLOCK):
        largest = np.abs(x[..., at : at + BLOCK]).max(axis=-1, keepdims=True)
        lost += largest / 127 / 2 * np.abs(matrix[:, at : at + BLOCK]).sum(axis=1)
    bound: Floats = (lost * 1.01 + 1e-4).astype(np.float32)
    return bound


@KINDS
@pytest.mark.parametrize(("K", "N"), [(320, 960), (200, 333), (2048, 17)])
@pytest.mark.parametrize("form", [matmul, gemm])
def test_products_are_those_of_the_bytes(
    form: Callable[[int, int], onnx.ModelProto], K: int, N: int, plain: bool
) -> None:
    model = form(K, N)
    made = quantised(model, plain)
    matrix = dequantised(made, K)
    float_matrix = arrays_of(model)["w"] if form is gemm else arrays_of(model)["w"].T
    assert np.abs(matrix - float_matrix).max() <= np.abs(float_matrix).max() / 127 / 2 * 1.01
    x = drawn(6, K) if form is gemm else drawn(6, 5, K)
    expected = x @ matrix.T + (drawn(N) if form is gemm else 0)
    allowed = 1e-3 if plain else rounding_bound(x, matrix)
    assert (np.abs(run(made, x) - expected) <= allowed).all()
    kinds = [node.op_type for node in made.graph.node if node.domain == "com.microsoft"]
    assert kinds == ([] if plain else ["MatMulNBits"])
    assert "w" not in arrays_of(made)


@KINDS
def test_the_same_graph_gives_the_same_bytes(plain: bool) -> None:
    one, other = (quantised(gemm(200, 333), plain) for _ in range(2))
    assert one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)


@KINDS
def test_what_is_small_scaled_or_computed_stays_float(plain: bool) -> None:
    node = helper.make_node
    products = [
        node("MatMul", ["x", "small"], ["a"]),
        node("Gemm", ["a", "scaled", "b"], ["c"], transB=1, alpha=0.5),
        node("Transpose", ["c"], ["d"], perm=[1, 0]),
        node("MatMul", ["c", "d"], ["e"]),
        node("MatMul", ["e", "a"], ["y"]),
    ]
    small, scaled = drawn(64, LEAST_ELEMENTS // 64 - 1), drawn(300, LEAST_ELEMENTS // 64 - 1)
    model = product_graph(products, 2, 64, small=small, scaled=scaled, b=drawn(300))
    assert quantised(model, plain) == model


def test_values_at_the_ends_and_blocks_of_nothing_survive() -> None:
    matrix = np.zeros((3, 3 * BLOCK), dtype=np.float32)
    matrix[0, :2] = 5, -5
    matrix[1, BLOCK:] = np.float32(1e-45)  # below what a scale can be
    data, scales = to_bytes(matrix)
    assert (data[0, 0, :3] == [255, 1, 128]).all() and (data[0, 1:] == 128).all()
    assert (data[1:] == 128).all() and (scales[1:] == 1).all()
    assert to_bytes(matrix[:, :70])[0].shape == (3, 2, BLOCK)


@pytest.mark.parametrize(("K", "N"), [(320, 320), (200, 333)])
def test_a_row_depends_on_no_other_row_and_on_no_later_token(K: int, N: int) -> None:
    """Bit for bit: neighbours a thousand times larger would spoil any scale that is shared."""
    made = quantised(matmul(K, N), plain=False)
    x = drawn(8, 33, K)
    x[1::2] *= 1000
    x[0, 20:] *= 1000
    together = run(made, x)
    for rows, length in ((1, 1), (1, 20), (2, 33), (3, 5), (8, 1)):
        np.testing.assert_array_equal(run(made, x[:rows, :length]), together[:rows, :length])
    np.testing.assert_array_equal(run(made, x[5:6, 7:8]), together[5:6, 7:8])


def test_a_tied_decoder_has_each_matrix_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig("decoder", layers=1, heads=2, width=128, window=32, tied=True)
    model = build_model(config, Sizes(vocabulary=300)).eval()
    shapes = ((2, 3), (3, 5))
    small, large = ([torch.zeros(shape, dtype=torch.int64)] for shape in shapes)
    traced = trace(model, small, large)
    assert traced.step is not None
    rung = stitch(traced.graph, "euler", 2)
    graphs = [*stitch_step(traced.graph, traced.step, "euler"), stitch(traced.graph, "euler", 4)]
    tokens = torch.randint(300, (3, 20))
    with torch.no_grad():
        expected = model(tokens, steps=2, method="euler").logits.numpy()
    quantise(rung, plain=True)
    session = ort.InferenceSession(rung.SerializeToString())
    (logits,) = session.run(None, {"tokens": tokens.numpy(), "keep": np.arange(20)})
    assert 0 < np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()

    for graph, plain in zip(graphs, (False, False, False, True), strict=True):
        quantise(graph, plain)
    weights = WeightsFile("weights.bin")
    for graph in (rung, *graphs):
        onnx.checker.check_model(graph, full_check=True)
        weights.externalise(graph)
    of_rung, *others = (places(graph) for graph in (rung, *graphs))
    assert others.pop() == of_rung
    matrices = [place for name, place in of_rung.items() if name.endswith(".bytes")]
    assert len(matrices) == 4  # two of the feed-forward, one of the attention, the head
    assert set(matrices) == {
        place for other in others for name, place in other.items() if name.endswith(".bytes")
    }
    (table,) = (place for name, place in of_rung.items() if name.endswith("tokens.weight"))
    assert table in others[0].values() and table not in others[2].values()
    weights.write(tmp_path)
    float_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert (tmp_path / "weights.bin").stat().st_size < 0.6 * float_bytes


def places(model: onnx.ModelProto) -> dict[str, str]:
    """Where each large initializer of a graph stands in the weights file."""
    return {
        tensor.name: next(entry.value for entry in tensor.external_data if entry.key == "offset")
        for tensor in model.graph.initializer
        if tensor.external_data
    }


def test_precisions_have_names_and_dynamic_ones_a_reason() -> None:
    assert [check_precision(word) for word in ("fp32", "int8")] == ["fp32", "int8"]
    for word in ("dynamic", "dynamic-int8", "int8-dynamic"):
        with pytest.raises(ValueError, match=r"tokens after it\. Choose int8"):
            check_precision(word)
    with pytest.raises(
        ValueError, match="unknown precision int4: choose one of fp32, fp16, bf16, int8"
    ):
        check_precision("int4")
