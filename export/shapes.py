"""Sizes that a runtime cannot find out by itself, written into a graph.

Without them it has to take the same length for another one at every step, and then compares all
buffers of a long rung with each other when it opens the graph. Knows values and symbols; not what
is computed.
"""

from collections.abc import Iterable

import onnx


def keep_shapes(model: onnx.ModelProto) -> None:
    """State the shapes in which a size appears that no input of their node has.

    All others follow from these. The graph's large weights must be outside it.
    """
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    inferred = {value.name: value for value in graph.value_info}
    symbols = {
        value.name: {size.dim_param for size in value.type.tensor_type.shape.dim if size.dim_param}
        for value in (*graph.input, *graph.output, *graph.value_info)
    }

    def known(names: Iterable[str]) -> set[str]:
        return set().union(*(symbols.get(name, set()) for name in names))

    for node in model.graph.node:
        new = known(node.output) - known(node.input)
        if new:
            model.graph.value_info.extend(
                inferred[name] for name in node.output if name in inferred
            )
