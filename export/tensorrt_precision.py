"""Matrix products in 16-bit floats, said in the graph itself.

TensorRT's networks are strongly typed: an operator computes in the type of its inputs. So a cast
is put before every float input of a matrix product and one behind it, and all else, and what goes
in and out, stays float32. Knows operators; not which graph they make.
"""

from onnx import ModelProto, NodeProto, TensorProto, helper

from serve.runtime.trt_manifest import Precision

_PRODUCTS = ("MatMul", "Gemm")
_TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def lower_products(model: ModelProto, precision: Precision) -> None:
    """Make every matrix product compute in this precision; in place."""
    if precision == "fp32":
        return
    nodes: list[NodeProto] = []
    lowered: dict[str, str] = {}  # a name to its cast: a weight is cast once for all steps
    for node in model.graph.node:
        if node.op_type not in _PRODUCTS:
            nodes.append(node)
            continue
        for index, name in enumerate(node.input):
            if name not in lowered:
                lowered[name] = f"{name}_{precision}"
                nodes.append(_cast(name, lowered[name], _TYPES[precision]))
            node.input[index] = lowered[name]
        output = node.output[0]
        node.output[0] = f"{output}_{precision}"
        nodes += [node, _cast(node.output[0], output, TensorProto.FLOAT)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _cast(source: str, target: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"product_{target}", to=kind)
