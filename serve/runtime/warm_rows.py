"""The largest inputs that a manifest promises: a graph that takes them takes any.

Knows sizes only; what is in them means nothing.
"""

import numpy as np

from serve.bundle import ImageInput, Manifest, PointsInput
from serve.runtime.protocol import IntArray, RowArray


def largest_row(manifest: Manifest) -> RowArray:
    """One row of what a classifier takes, without its batch."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return np.zeros((channels, height, width), dtype=np.float32)
        case PointsInput(max_points=max_points, dimensions=dimensions):
            return np.zeros((max_points, dimensions), dtype=np.float32)
        case _:
            return largest_tokens(manifest)


def largest_tokens(manifest: Manifest) -> IntArray:
    """The longest row of the greatest token."""
    spec = manifest.text_tokenizer
    token = spec.vocab_size - 1
    if token == spec.pad_id:
        token = max(0, token - 1)
    return np.full(manifest.text_input.max_tokens, token, dtype=np.int64)


def largest_in_words(manifest: Manifest) -> str:
    """What `largest_row` is, for messages."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return f"an image of {channels} x {height} x {width}"
        case PointsInput(max_points=max_points, dimensions=dimensions):
            return f"{max_points} points of {dimensions} dimensions"
        case _:
            return (
                f"{manifest.text_input.max_tokens} tokens of a vocabulary of "
                f"{manifest.text_tokenizer.vocab_size}"
            )
