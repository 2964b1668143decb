"""The step of a decoder for groups of rows, each with caches of its own.

Rows of one group stand at the same step of the same rung, so their caches lie side by side; another
group's lie elsewhere. Products run over all rows at once, attention group after group. Knows the
graph of one step; not which groups there will be.

    order: the rows, and the number of any row for each group that is not used, to attend there
    sizes: how many of those each group has
"""

import copy

import onnx
from onnx import TensorProto, helper

from export.attention import CACHED
from export.builder import CONTRIB
from export.layers import node_of

_LENGTHS = ("seqlens", "total")


def mixed_step(step: onnx.ModelProto, groups: int) -> onnx.ModelProto:
    """The same step for so many groups; what is a group's own ends in its number."""
    model = copy.deepcopy(step)
    graph = model.graph
    ports = {value.name: value for value in (*graph.input, *graph.output)}
    own = set(_LENGTHS)
    nodes = [
        node_of("Shape", ["x"], "rows.shape", start=0, end=1),
    ]
    for node in graph.node:
        if node.op_type != CACHED:
            nodes.append(node)
            continue
        own |= {*node.input[3:5], *node.output[1:3]}
        nodes += _by_group(node, groups)
        graph.value_info.append(_answer(node, ports))
    for values in (graph.input, graph.output):
        shared = [value for value in values if value.name not in own]
        each = [value.name for value in values if value.name in own]
        more = [_port(ports[name], group) for group in range(groups) for name in each]
        del values[:]
        values.extend(shared + more)
    graph.input.append(helper.make_tensor_value_info("order", TensorProto.INT64, ["ordered"]))
    graph.input.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [groups]))
    zero = helper.make_tensor("rows.first", TensorProto.INT64, [1], [0])
    graph.initializer.append(zero)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.name = "mixed"
    return model


def _by_group(node: onnx.NodeProto, groups: int) -> list[onnx.NodeProto]:
    qkv, past, (answer, *present) = node.input[0], node.input[3:5], node.output
    parts = [f"{answer}/part_{group}" for group in range(groups)]
    attended = [f"{answer}/attended_{group}" for group in range(groups)]
    split = helper.make_node(
        "Split", [f"{answer}/ordered", "sizes"], parts, name=f"{answer}/parts", axis=0
    )
    nodes = [node_of("Gather", [qkv, "order"], f"{answer}/ordered", axis=0), split]
    for group in range(groups):
        own = [f"{name}_{group}" for name in (*past, *_LENGTHS)]
        made = helper.make_node(
            CACHED,
            [parts[group], "", "", *own, *node.input[7:]],
            [attended[group], *(f"{name}_{group}" for name in present)],
            name=f"{answer}/group_{group}",
            domain=CONTRIB,
        )
        made.attribute.extend(node.attribute)
        nodes.append(made)
    nodes.append(node_of("Concat", attended, f"{answer}/all", axis=0))
    # The rows come first, those that only keep unused groups busy behind them.
    nodes.append(node_of("Slice", [f"{answer}/all", "rows.first", "rows.shape"], answer))
    return nodes


def _answer(node: onnx.NodeProto, ports: dict[str, onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
    """Its shape, which is lost behind Slice: then the runtime would not fuse a norm with the sum
    before it, as it does in the step of one group, and the last bits would differ."""
    _, heads, _, width = (
        size.dim_value for size in ports[node.input[3]].type.tensor_type.shape.dim
    )
    shape = ["batch", "length", heads * width]
    return helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, shape)


def _port(value: onnx.ValueInfoProto, group: int) -> onnx.ValueInfoProto:
    """The port of one group, whose rows and capacity are its own."""
    port = copy.deepcopy(value)
    port.name = f"{value.name}_{group}"
    for size in port.type.tensor_type.shape.dim:
        if size.dim_param:
            size.dim_param = f"{size.dim_param}_{group}"
    return port
