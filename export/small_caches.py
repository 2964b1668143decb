"""8-bit caches: the step of a decoder with keys and values as bytes, a scale for every channel.

Knows the node that caches them; not how large they are (cache_scales.py measures that).
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.attention import CACHED

PARTS = ("keys", "values")
CachePrecision = Literal["fp32", "int8"]
# What a byte of 1 stands for: of each attention, keys and values, head and channel.
Scales = npt.NDArray[np.float32]  # (attentions, 2, H, d)


def cache_bytes(step: onnx.GraphProto, scales: Scales) -> None:
    """Have the step of a decoder keep its keys and values as bytes, in place."""
    ports = {value.name: value for value in (*step.input, *step.output)}
    cached = [node for node in step.node if node.op_type == CACHED]
    for index, node in enumerate(cached):
        node.input.extend([""] * 5)  # rotary tables, positions, a bias, a sink: none is used
        for part, values in zip(PARTS, scales[index % len(scales)], strict=True):
            name = f"{node.name}/{part}/scale"
            step.initializer.append(numpy_helper.from_array(values[None, :, None], name))
            node.input.append(name)  # (1, H, 1, d)
        node.attribute.extend(
            [
                helper.make_attribute("kv_cache_bit_width", 8),
                helper.make_attribute("k_quant_type", "PER_CHANNEL"),
                helper.make_attribute("v_quant_type", "PER_CHANNEL"),
            ]
        )
        for name in (*node.input[3:5], *node.output[1:3]):
            ports[name].type.tensor_type.elem_type = TensorProto.INT8
