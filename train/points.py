"""Labelled point clouds from .npz files, each centred and scaled into the unit sphere.

A batch is a function of (seed, iteration). Knows no models.
"""

from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer

from train.arrays import Examples, open_arrays
from train.batch import Batch, Sizes
from train.config import DataConfig
from train.shuffle import Shuffle
from train.tables import DataError


class PointDataset:
    """Clouds of `points` points, drawn from those of the file where it has more."""

    tokenizer: Tokenizer | None = None

    def __init__(self, config: DataConfig, points: int, seed: int) -> None:
        self._data = open_arrays(config, seed, _clouds)
        self.labels: tuple[str, ...] = self._data.names
        self.digest = self._data.digest
        self.sizes = Sizes(classes=len(self.labels), dimensions=self._data.used.values.shape[2])
        self.points = points
        self._shuffle = Shuffle(len(self._data.used))

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        rows = self._data.used.at(self._shuffle.rows(iteration, size, seed))
        clouds = rows.values  # (B, P, 3)
        if clouds.shape[1] > self.points:
            draw = np.random.default_rng((seed, iteration, 1))
            order = np.argsort(draw.random(clouds.shape[:2]), axis=1)[:, : self.points]
            clouds = np.take_along_axis(clouds, order[:, :, None], axis=1)
        return _batch(clouds, rows.classes)

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.held, size)

    def _in_order(self, examples: Examples, size: int) -> Iterator[Batch]:
        count = examples.values.shape[1]
        chosen = np.arange(count)
        if count > self.points:  # the same points of every cloud, whatever order the file has
            chosen = np.random.default_rng(0).permutation(count)[: self.points]
        for start in range(0, len(examples), size):
            rows = examples.at(np.arange(start, min(start + size, len(examples))))
            yield _batch(rows.values[:, chosen], rows.classes)


def unit_sphere(clouds: np.ndarray) -> np.ndarray:
    """Each cloud (B, P, dimensions) centred on its mean, its farthest point at distance 1."""
    clouds = clouds.astype(np.float32)
    clouds = clouds - clouds.mean(1, keepdims=True)
    farthest = np.linalg.norm(clouds, axis=2).max(1)  # (B,)
    farthest[farthest == 0] = 1.0  # all points in one place
    scaled: np.ndarray = clouds / farthest[:, None, None]
    return scaled


def _batch(clouds: np.ndarray, classes: np.ndarray) -> Batch:
    return Batch((torch.from_numpy(unit_sphere(clouds)),), torch.from_numpy(classes))


def _clouds(values: np.ndarray, name: str) -> np.ndarray:
    if values.ndim != 3 or values.dtype.kind not in "uif" or 0 in values.shape[1:]:
        raise DataError(
            f"{name}: {values.dtype} of shape {values.shape}; expected numbers of shape (clouds, "
            "points, dimensions)"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{name}: a coordinate is not finite; remove that cloud")
    return values
