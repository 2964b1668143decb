"""The forms of a traced attention, and sums over positions, beside what torch computes."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.attention import fused, marks, written_out
from export.graph import GraphBuilder
from export.pieces import FLOAT, Function, Piece, Port, sum_by_products, trace_functions
from serve.runtime.protocol import FloatArray
from train.blocks import Block, BlockVelocity

HEADS, WIDTH, ROWS, LENGTH = 2, 16, 4, 9
X = Port("x", FLOAT, ("batch", "length", WIDTH))
MASK = Port("mask", TensorProto.BOOL, ("batch", "length"))
Y = Port("y", FLOAT, ("batch", "length", WIDTH))


def velocity(causal: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(WIDTH, HEADS, 32, causal) for _ in range(2)]
    return BlockVelocity(blocks, WIDTH, final_norm=True).eval()


@pytest.fixture(scope="module")
def pieces() -> dict[str, Piece]:
    x, mask = torch.zeros(2, 3, WIDTH), torch.ones(2, 3).bool()
    functions = (
        Function(velocity(causal=True), (x,), ((0, 1),)),
        Function(velocity(causal=False), (x,), ((0, 1),)),
        Function(velocity(causal=False), (x, mask), ((0, 1), (0, 1))),
    )
    return dict(zip(("causal", "all", "masked"), trace_functions(functions), strict=True))


def session(piece: Piece) -> ort.InferenceSession:
    build = GraphBuilder()
    inputs = (X, MASK)[: len(piece.inputs)]
    (made,) = build.paste(piece, "velocity", "velocity", [port.name for port in inputs])
    model = build.model("velocity", inputs, {made: Y})
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString())


def inputs_of(kind: str) -> tuple[Tensor, ...]:
    """Rows of all lengths; of one there is nothing but padding."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    lengths = torch.tensor([LENGTH, 5, 1, 0])
    mask = torch.arange(LENGTH) < lengths[:, None]  # (B, N)
    return (x, mask) if kind == "masked" else (x,)


@pytest.mark.parametrize("kind", ["causal", "all", "masked"])
@pytest.mark.parametrize("form", [written_out, fused])
def test_a_form_computes_what_torch_does_and_rows_are_independent(
    pieces: dict[str, Piece], form: Callable[[Piece], Piece], kind: str
) -> None:
    assert len(marks(pieces[kind])) == 2
    run, inputs = session(form(pieces[kind])), inputs_of(kind)

    def answer(rows: slice) -> FloatArray:
        fed = {port.name: each[rows].numpy() for port, each in zip((X, MASK), inputs, strict=False)}
        (y,) = run.run(None, fed)
        return np.asarray(y)

    with torch.no_grad():
        expected = velocity(kind == "causal")(*inputs).numpy()
    together = answer(slice(None))
    np.testing.assert_allclose(together, expected, atol=1e-5)
    alone = [answer(slice(row, row + 1)) for row in range(ROWS)]
    np.testing.assert_array_equal(np.concatenate(alone), together)


def test_only_the_fused_form_has_operators_of_one_runtime(pieces: dict[str, Piece]) -> None:
    for kind, piece in pieces.items():
        assert {node.domain for node in written_out(piece).nodes} == {""}
        operators = {node.op_type for node in fused(piece).nodes}
        assert ("MultiHeadAttention" in operators) == (kind != "causal")
        assert ("Softmax" in operators) == (kind == "causal")


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
def test_sums_over_positions_do_not_depend_on_the_rows_beside(op: str, keepdims: int) -> None:
    x = Port("x", FLOAT, ("batch", "length", 8))
    y = helper.make_tensor_value_info("y", FLOAT, None)
    node = helper.make_node(op, ["x", "axes"], ["y"], keepdims=keepdims)
    axes = numpy_helper.from_array(np.array([1]), "axes")
    given = helper.make_tensor_value_info(x.name, x.kind, x.shape)
    graph = helper.make_graph([node], "sum", [given], [y], [axes])
    sum_by_products(graph)
    assert op not in {each.op_type for each in graph.node}
    del graph.initializer[0]  # nothing uses the axes any more
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    run = ort.InferenceSession(model.SerializeToString())
    values = np.random.default_rng(0).standard_normal((5, 33, 8)).astype(np.float32)
    (together,) = run.run(None, {"x": values})
    reduce = np.sum if op == "ReduceSum" else np.mean
    np.testing.assert_allclose(together, reduce(values, 1, keepdims=bool(keepdims)), atol=1e-5)
    alone = [run.run(None, {"x": values[row : row + 1]})[0] for row in range(5)]
    np.testing.assert_array_equal(np.concatenate(alone), together)
