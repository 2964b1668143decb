"""Sums and means over positions as products, so that a row's does not depend on its neighbours.

ONNX Runtime adds up the positions of a single row in another order than those of several rows, and
then the last bits of an answer depend on its batch. Products it makes row by row. Knows nodes; not
what is summed.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_REDUCTIONS = ("ReduceSum", "ReduceMean")
_RANK, _AXES = 3, ([1], [-2])  # of x (B, N, D), and of its positions
_AXIS, _ONE_ROW = "positions.axis", "positions.one_row"


def sum_by_products(graph: onnx.GraphProto) -> None:
    """Rewrite, in place, those whose input is known to have three dimensions."""
    known = {each.name: each.type.tensor_type for each in (*graph.input, *graph.value_info)}
    axes = {each.name: each for each in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    found = False
    for node in graph.node:
        if node.op_type in _REDUCTIONS and _is_over_positions(node, known, axes):
            found = True
            nodes += _product(node)
        else:
            nodes.append(node)
    if found:
        del graph.node[:]
        graph.node.extend(nodes)
        for name, value in ((_AXIS, [1]), (_ONE_ROW, [1, 1])):
            graph.initializer.append(numpy_helper.from_array(np.array(value), name))


def _is_over_positions(
    node: onnx.NodeProto,
    known: dict[str, onnx.TypeProto.Tensor],
    constants: dict[str, onnx.TensorProto],
) -> bool:
    x, axes = (*node.input, "")[:2]
    if x not in known or axes not in constants:
        return False
    kind = known[x]
    return (
        kind.elem_type == TensorProto.FLOAT
        and len(kind.shape.dim) == _RANK
        and numpy_helper.to_array(constants[axes]).tolist() in _AXES
    )


def _product(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Ones (1, 1, N), or for a mean what they are divided by, times x (B, N, D)."""
    x, (y,) = node.input[0], node.output
    keeps = all(each.i for each in node.attribute if each.name == "keepdims")
    one = numpy_helper.from_array(np.array([1], dtype=np.float32))
    product = y if keeps else f"{y}/product"
    nodes = [
        _node("Shape", [x], f"{y}/count", start=1, end=2),
        _node("Concat", [_ONE_ROW, f"{y}/count"], f"{y}/shape", axis=0),
        _node("ConstantOfShape", [f"{y}/shape"], f"{y}/ones", value=one),
    ]
    weights = f"{y}/ones"
    if node.op_type == "ReduceMean":
        weights = f"{y}/weights"
        nodes += [
            _node("Cast", [f"{y}/count"], f"{y}/divisor", to=TensorProto.FLOAT),
            _node("Div", [f"{y}/ones", f"{y}/divisor"], weights),
        ]
    nodes.append(_node("MatMul", [weights, x], product))  # (B, 1, D)
    if not keeps:
        nodes.append(_node("Squeeze", [product, _AXIS], y))
    return nodes


def _node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **attributes)
