"""The margin of an answer: how far its largest logit is ahead of the second.

For a label at each position, the smallest margin of the row; padding does not count.
"""

import numpy as np
import numpy.typing as npt

from serve.bundle import Manifest
from serve.runtime.protocol import FloatArray, RowArray

Present = npt.NDArray[np.bool_]  # (B, N): positions that are not padding


def present_positions(rows: RowArray, manifest: Manifest) -> Present | None:
    """Where rows have tokens, for models that label positions; None for others."""
    if manifest.task != "tag":
        return None
    present: Present = rows != manifest.text_tokenizer.pad_id
    return present


def ahead(logits: FloatArray, present: Present | None) -> FloatArray:
    """Margins (..., B) of logits (..., B, C), or (..., B, N, C) of rows with these positions.

    -inf where a logit is NaN.
    """
    top = np.partition(logits, -2, axis=-1)[..., -2:]  # a NaN counts as the largest
    with np.errstate(invalid="ignore"):
        margins: FloatArray = top[..., 1] - top[..., 0]
    margins[np.isnan(margins)] = -np.inf
    if present is None:
        return margins
    least: FloatArray = np.where(present, margins, np.inf).min(axis=-1)
    return least
