"""Checks of what a classifier takes: padded tokens, pixels or points.

Knows the manifest; not the graphs.
"""

import numpy as np

from serve.bundle import ImageInput, Manifest, PointsInput
from serve.runtime.protocol import FloatArray, IntArray, RowArray
from serve.runtime.token_checks import check_tokens


def check_rows(rows: RowArray, manifest: Manifest) -> RowArray:
    """The rows, contiguous; ValueError for what the manifest does not promise to take."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return _check_floats(rows, (channels, height, width))
        case PointsInput(max_points=max_points, dimensions=dimensions):
            rows = _check_floats(rows, (rows.shape[1] if rows.ndim > 1 else 0, dimensions))
            if rows.shape[1] > max_points:
                raise ValueError(f"{rows.shape[1]} points are more than {max_points}")
            return rows
        case _:
            return _check_texts(rows, manifest)


def _check_texts(rows: RowArray, manifest: Manifest) -> IntArray:
    tokenizer, max_tokens = manifest.text_tokenizer, manifest.text_input.max_tokens
    tokens = check_tokens(rows, 2, tokenizer.vocab_size)  # (B, N)
    if tokens.shape[1] > max_tokens:
        raise ValueError(
            f"{tokens.shape[1]} tokens a row are more than max_tokens ({max_tokens}); "
            "truncate first"
        )
    if (tokens[:, 0] == tokenizer.pad_id).any():
        raise ValueError("a row begins with padding; each has a real token, pads to its right")
    return tokens


def _check_floats(rows: RowArray, shape: tuple[int, ...]) -> FloatArray:
    """Rows (B, *shape) of finite numbers, contiguous."""
    if rows.dtype != np.float32 or rows.shape[1:] != shape or rows.size == 0:
        raise ValueError(
            f"rows must be a non-empty float32 array of shape (batch, "
            f"{', '.join(map(str, shape))}), not {rows.dtype} {rows.shape}"
        )
    floats: FloatArray = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(floats).all():
        raise ValueError("rows hold a number that is not finite")
    return floats
