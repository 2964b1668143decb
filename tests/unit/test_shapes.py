"""Sizes that are written into a graph: with them a runtime knows the shape of every value."""

import onnx
from onnx import TensorProto, helper

from export.graph import IR_VERSION, keep_shapes
from export.pieces import OPSET


def masked_sum() -> onnx.ModelProto:
    """A mask whose size is computed from that of x, as in causal attention, added twice."""
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Concat", ["length", "length"], ["size"], axis=0),
        helper.make_node("ConstantOfShape", ["size"], ["full"]),
        helper.make_node("Trilu", ["full"], ["mask"], upper=1),
        helper.make_node("Add", ["x", "mask"], ["once"]),
        helper.make_node("Add", ["once", "mask"], ["y"]),
    ]
    sizes = ["batch", "length", "length"]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in "xy")
    graph = helper.make_graph(nodes, "masked", [x], [y])
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def shapes(model: onnx.ModelProto) -> dict[str, list[str]]:
    """What a runtime finds out that does not look into values."""
    found = onnx.shape_inference.infer_shapes(model).graph.value_info
    return {
        value.name: [size.dim_param for size in value.type.tensor_type.shape.dim] for value in found
    }


def test_few_shapes_are_stated_and_all_others_follow() -> None:
    model = masked_sum()
    assert shapes(model)["once"] != ["batch", "length", "length"]
    keep_shapes(model)
    assert [value.name for value in model.graph.value_info] == ["full"]
    found = shapes(model)
    assert found["mask"] == ["length", "length"]
    assert found["once"] == ["batch", "length", "length"]
    onnx.checker.check_model(model, full_check=True)
