"""What a bundle answers to one input, given as a request gives it.

Knows how each task is run; not what the answers should be.
"""

from typing import Any

import numpy as np

from serve.bundle import Bundle, ImageInput, PointsInput
from serve.inputs.images import PixelCount, read_image
from serve.inputs.rows import read_points
from serve.inputs.text import TextCodec
from serve.runtime import OpenedModel
from serve.runtime.protocol import FloatArray, IntArray, RowArray


def rows_of(bundle: Bundle, asked: Any) -> RowArray:
    """The one row that the model takes: what a text, an image or points become."""
    match bundle.manifest.input:
        case ImageInput() as spec:
            return read_image(asked, spec, PixelCount(), "input")[None]  # (1, C, H, W)
        case PointsInput() as spec:
            return read_points(asked, spec, "input")[None]  # (1, N, dimensions)
        case _:
            codec = TextCodec(bundle)
            if bundle.manifest.task == "classify":
                tokens = codec.encode_input(asked, truncate=True).tokens
            else:
                tokens = codec.encode_prompt(asked)
            return np.array([tokens], dtype=np.int64)  # (1, S)


def answer(opened: OpenedModel, steps: int, rows: RowArray, target: IntArray) -> FloatArray:
    """Logits (C,) of a class, or (S, V) at every position; `target` (1, N) is what is translated
    so far, and means nothing to other tasks."""
    match opened.bundle.manifest.task:
        case "classify":
            logits = opened.classifier(steps).run(rows)
        case "generate":
            logits = opened.decoder(steps).forward(rows.astype(np.int64))
        case "translate":
            logits = opened.translator(steps).forward(rows.astype(np.int64), target)
    only: FloatArray = logits[0]
    return only
