"""Checks of token arrays before a runtime gets them.

Knows shapes and ranges; no graph would name the wrong row as clearly.
"""

import numpy as np

from serve.runtime.protocol import IntArray, RowArray


def check_tokens(tokens: RowArray, dimensions: int, vocab_size: int) -> IntArray:
    """The tokens, contiguous; ValueError unless there are some and all are in the vocabulary."""
    if tokens.ndim != dimensions or tokens.dtype != np.int64 or tokens.size == 0:
        raise ValueError(
            f"tokens must be a non-empty int64 array of {dimensions} dimensions, not "
            f"{tokens.dtype} {tokens.shape}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return np.ascontiguousarray(tokens, dtype=np.int64)
