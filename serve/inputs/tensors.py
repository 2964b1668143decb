"""Images and clouds of points that come as tensors, as the rows that a model takes.

Knows elements and specs; deliberately not how a tensor was sent.
"""

import numpy as np
import numpy.typing as npt

from serve.bundle import ImageInput
from serve.errors import Unprocessable
from serve.inputs.images import normalised
from serve.inputs.intake import Intake
from serve.inputs.points import unit_cloud

Numbers = npt.NDArray[np.float64]


def image_rows(tensor: Numbers, whole: bool, spec: ImageInput, param: str) -> list[Intake]:
    """Rows of images (B, C, H, W) of the model's size: from 0 to 255 if whole, else to 1."""
    if not whole and (tensor.min() < 0 or tensor.max() > 1):
        worst = tensor.min() if tensor.min() < 0 else tensor.max()
        raise Unprocessable(
            f"{param} has the value {worst:g}: send FP32 from 0 to 1, or UINT8", param=param
        )
    pixels = (tensor.astype(np.float32) / np.float32(255 if whole else 1)).transpose(0, 2, 3, 1)
    return [Intake(normalised(one, spec)) for one in pixels]  # (H, W, C) each


def cloud_rows(tensor: Numbers) -> list[Intake]:
    """Rows of clouds (B, N, dimensions)."""
    return [Intake(unit_cloud(cloud)) for cloud in tensor]
