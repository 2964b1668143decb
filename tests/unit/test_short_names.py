"""Values of exported graphs have short names, and compute what they did."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from export.graph import short_names
from export.run import ExportRequest, export_run
from tests.fixtures.tiny_runs import tiny_label_run

FLOAT = TensorProto.FLOAT


def branched() -> onnx.ModelProto:
    """(x + w) doubled or not, by a branch that reads what was computed outside of it."""

    def branch(name: str, op: str, inputs: list[str]) -> onnx.GraphProto:
        nodes = [
            helper.make_node(op, inputs, [f"{name}/inside"], f"{name}/node"),
            helper.make_node("Identity", [f"{name}/inside"], [f"{name}/out"]),
        ]
        out = helper.make_tensor_value_info(f"{name}/out", FLOAT, [2])
        return helper.make_graph(nodes, name, [], [out])

    nodes = [
        helper.make_node("Add", ["x", "v0"], ["a/long/name"], "a/long/node"),
        helper.make_node(
            "If",
            ["chosen"],
            ["of/branches"],
            then_branch=branch("then", "Add", ["a/long/name", "a/long/name"]),
            else_branch=branch("else", "Identity", ["a/long/name"]),
        ),
        helper.make_node("Identity", ["of/branches"], ["out"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", FLOAT, [2]),
        helper.make_tensor_value_info("chosen", TensorProto.BOOL, []),
    ]
    weights = [numpy_helper.from_array(np.array([1, 2], np.float32), "v0")]
    between = helper.make_tensor_value_info("a/long/name", FLOAT, [2])
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_tensor_value_info("out", FLOAT, [2])],
        weights,
        value_info=[between],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_what_is_computed_has_short_names_also_inside_branches() -> None:
    model = branched()
    before = model.ByteSize()
    short_names(model)
    onnx.checker.check_model(model, full_check=True)
    assert model.ByteSize() < before
    (add, choose, _) = model.graph.node
    assert list(add.input) == ["x", "v0"] and list(add.output) == ["v1"]  # v0 is taken
    assert model.graph.value_info[0].name == "v1"
    assert not any(node.name for node in model.graph.node)
    for attribute in choose.attribute:
        assert "v1" in attribute.g.node[0].input and not attribute.g.node[0].name
        assert attribute.g.output[0].name == f"{attribute.g.name}/out"
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([10, 20], np.float32)
    for chosen, expected in ((True, [22, 44]), (False, [11, 22])):
        (found,) = session.run(["out"], {"x": x, "chosen": np.array(chosen)})
        assert np.asarray(found).tolist() == expected


def test_graphs_of_a_bundle_keep_the_names_of_their_weights(tmp_path: Path) -> None:
    asked = ExportRequest(tmp_path / "bundle", (1, 2), samples=4, latency=False)
    bundle = export_run(tiny_label_run(tmp_path), asked, say=lambda _: None)
    model = onnx.load(str(bundle.graph_path(2)), load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    computed = {name for node in model.graph.node for name in node.output}
    ends = {value.name for value in model.graph.output}
    assert any("attention" in name for name in weights)
    assert max(map(len, computed - ends)) <= 6
    assert not any(node.name for node in model.graph.node)
