"""8-bit KV caches: their scales, measured on training rows, and the graphs that use them.

Scales are measured at the fewest and at the most steps and are the same for all requests, so no
answer depends on another request.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from export.attention import CACHED
from export.int8 import LARGEST
from train.blocks import Attention
from train.data.batch import Dataset
from train.model import OTTransformer, Stepped

# 8-bit caches: the step of a decoder with keys and values as bytes, a scale for every channel.


PARTS = ("keys", "values")
_SCALES_AT = 12  # the operator's inputs before them
CachePrecision = Literal["fp32", "fp16", "int8"]
# What a byte of 1 stands for: of each attention, keys and values, head and channel.
Scales = npt.NDArray[np.float32]  # (attentions, 2, K, d)


def cache_bytes(step: onnx.GraphProto, scales: Scales) -> None:
    """Have the step of a decoder keep its keys and values as bytes, in place."""
    ports = {value.name: value for value in (*step.input, *step.output)}
    cached = [node for node in step.node if node.op_type == CACHED]
    for index, node in enumerate(cached):
        # Before them: rotary tables, where there are any, positions, a bias and a sink.
        node.input.extend([""] * (_SCALES_AT - len(node.input)))
        for part, values in zip(PARTS, scales[index % len(scales)], strict=True):
            name = f"{node.name}/{part}/scale"
            step.initializer.append(numpy_helper.from_array(values[None, :, None], name))
            node.input.append(name)  # (1, K, 1, d)
        node.attribute.extend(
            [
                helper.make_attribute("kv_cache_bit_width", 8),
                helper.make_attribute("k_quant_type", "PER_CHANNEL"),
                helper.make_attribute("v_quant_type", "PER_CHANNEL"),
            ]
        )
        for name in (*node.input[3:5], *node.output[1:3]):
            ports[name].type.tensor_type.elem_type = TensorProto.INT8


ROWS, TOKENS = 32, 4096  # measured at most, but for one whole row
HEADROOM = 1.1  # what was not measured may be larger; what is beyond it is cut off


def measured_scales(
    model: Stepped, dataset: Dataset, steps: Collection[int], method: str, attentions: int
) -> Scales:
    """The scales of an evaluation that calls so many attentions."""
    assert isinstance(model, OTTransformer), "no other model keeps caches"
    (tokens,) = dataset.batch(0, ROWS, seed=0).inputs  # (B, N)
    rows = max(1, TOKENS // tokens.shape[1])
    with torch.no_grad(), _watched(model.velocity) as seen:
        for count in {min(steps), max(steps)}:
            model(tokens[:rows], steps=count, method=method)
    # The same attention of each evaluation, one after another.
    largest = [torch.stack(seen[first::attentions]).amax(dim=0) for first in range(attentions)]
    scales: Scales = (HEADROOM * torch.stack(largest).float() / LARGEST).numpy()
    scales[scales < np.finfo(np.float32).tiny] = 1  # a channel of nothing but 0
    return scales


@contextmanager
def _watched(velocity: nn.Module) -> Iterator[list[Tensor]]:
    """The largest keys and values (2, K, d) of each call of an attention, as they happen."""
    seen: list[Tensor] = []

    def watch(module: Attention) -> RemovableHandle:
        def look(_: nn.Module, __: object, qkv: Tensor) -> None:
            heads = qkv.unflatten(-1, (-1, module.head_width)).transpose(1, 2)  # (B, H + 2 K, N, d)
            _, keys, values = heads.split([module.heads, module.kv_heads, module.kv_heads], 1)
            keys = module.rotated(keys) if module.rotary else keys  # (B, K, N, d)
            seen.append(torch.stack([each.abs().amax(dim=(0, 2)) for each in (keys, values)]))

        return module.qkv.register_forward_hook(look)

    handles = [watch(one) for one in velocity.modules() if isinstance(one, Attention)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
