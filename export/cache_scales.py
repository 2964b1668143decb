"""How large the keys and values of a decoder are, measured: the scales of 8-bit caches.

On rows that it was trained on, at the fewest steps and the most, so that a scale is the same for
all requests and an answer depends on none but its own. Knows where attention gets them; neither
graphs nor bytes.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from export.quantise import LARGEST
from export.small_caches import Scales
from train.blocks import Attention
from train.data.batch import Dataset
from train.model import OTTransformer, Stepped

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
    """The largest keys and values (2, H, d) of each call of an attention, as they happen."""
    seen: list[Tensor] = []

    def watch(module: Attention) -> RemovableHandle:
        def look(_: nn.Module, __: object, qkv: Tensor) -> None:
            parts = qkv.unflatten(-1, (3, module.heads, module.head_width))  # (B, N, 3, H, d)
            seen.append(parts[:, :, 1:].abs().amax(dim=(0, 1)))

        return module.qkv.register_forward_hook(look)

    handles = [watch(one) for one in velocity.modules() if isinstance(one, Attention)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
