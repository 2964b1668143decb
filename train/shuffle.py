"""The order of rows: epochs that are a function of (seed, epoch), in batches of like length.

Knows lengths, not rows.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

POOL_BATCHES = 50  # batches sorted by length together, so that padding is small

IndexArray = npt.NDArray[np.int64]


class Shuffle:
    """Which rows make a batch; rows of one length only if `lengths` is a number of rows."""

    def __init__(self, lengths: Sequence[int] | int) -> None:
        equal = isinstance(lengths, int)
        self._lengths = np.zeros(lengths, np.int64) if equal else np.asarray(lengths, np.int64)
        self._epochs: dict[tuple[int, int, int], list[IndexArray]] = {}

    def rows(self, iteration: int, size: int, seed: int) -> IndexArray:
        per_epoch = max(1, len(self._lengths) // size)
        epoch, index = divmod(iteration, per_epoch)
        key = (epoch, size, seed)
        if key not in self._epochs:
            self._epochs = {key: self._epoch(epoch, size, seed)}
        return self._epochs[key][index]

    def _epoch(self, epoch: int, size: int, seed: int) -> list[IndexArray]:
        draw = np.random.default_rng((seed, epoch))
        order = draw.permutation(len(self._lengths))
        batches: list[IndexArray] = []
        for start in range(0, len(order), size * POOL_BATCHES):
            pool = order[start : start + size * POOL_BATCHES]
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        if len(batches) > 1:
            batches = [b for b in batches if len(b) == size]
        return [batches[i] for i in draw.permutation(len(batches))]


def divide(rows: int, held_out: float, seed: int) -> tuple[IndexArray, IndexArray]:
    """The rows to train on, and the share of them that is kept for validation."""
    order = np.random.default_rng(seed).permutation(rows)
    kept = max(1, int(rows * held_out))
    return order[kept:], order[:kept]


def digest_of(*parts: np.ndarray) -> str:
    """A name for the content of arrays of whole numbers."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.astype(np.int32).tobytes() + b";")
    return digest.hexdigest()
