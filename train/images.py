"""Labelled images: idx and .npz files of bytes, normalised, moved and mirrored in training.

A batch is a function of (seed, iteration), its random moves included. Knows no models.
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

MEASURED_TOGETHER = 4096  # images: bounds the memory that measuring mean and std takes


class ImageDataset:
    """Images (channels, height, width) of one size, with a class each."""

    tokenizer: Tokenizer | None = None

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._data = open_arrays(config, seed, _pixels)
        self.labels: tuple[str, ...] = self._data.names
        self.digest = self._data.digest
        channels, height, width = self._data.used.values.shape[1:]
        self.sizes = Sizes(classes=len(self.labels), channels=channels, height=height, width=width)
        # Of each channel, for pixels from 0 to 1: what a bundle must know to prepare an image.
        self.mean, self.std = _mean_and_std(config, self._data.used.values)
        self._shift, self._flip = config.shift, config.flip
        self._shuffle = Shuffle(len(self._data.used))

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        rows = self._data.used.at(self._shuffle.rows(iteration, size, seed))
        draw = np.random.default_rng((seed, iteration, 1))
        pixels = rows.values  # (B, C, H, W) bytes
        if self._shift:
            pixels = shifted(pixels, self._shift, draw)
        if self._flip:
            mirrored = draw.random(len(pixels)) < 0.5
            pixels = np.where(mirrored[:, None, None, None], pixels[..., ::-1], pixels)
        return self._normalised(Examples(pixels, rows.classes))

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._data.held, size)

    def _in_order(self, examples: Examples, size: int) -> Iterator[Batch]:
        for start in range(0, len(examples), size):
            yield self._normalised(examples.at(np.arange(start, min(start + size, len(examples)))))

    def _normalised(self, examples: Examples) -> Batch:
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1)  # (1, C, 1, 1)
            for values in (self.mean, self.std)
        )
        pixels = torch.from_numpy(np.ascontiguousarray(examples.values)).float()
        pixels.div_(255).sub_(mean).div_(std)  # (B, C, H, W)
        return Batch((pixels,), torch.from_numpy(examples.classes))


def shifted(pixels: np.ndarray, most: int, draw: np.random.Generator) -> np.ndarray:
    """Each image moved by up to `most` pixels either way, with zeros where nothing was."""
    H, W = pixels.shape[2:]
    room = np.pad(pixels, ((0, 0), (0, 0), (most, most), (most, most)))
    moved = np.empty_like(pixels)
    for i, (down, right) in enumerate(draw.integers(0, 2 * most + 1, (len(pixels), 2))):
        moved[i] = room[i, :, down : down + H, right : right + W]
    return moved


def _pixels(values: np.ndarray, name: str) -> np.ndarray:
    """Bytes as (N, C, H, W), from (N, H, W) or (N, H, W, C)."""
    if values.dtype != np.uint8:
        raise DataError(f"{name}: {values.dtype}; give pixels from 0 to 255, of type uint8")
    if values.ndim == 3:
        return values[:, None]
    if values.ndim == 4 and values.shape[3] in (1, 3, 4):
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    raise DataError(
        f"{name}: shape {values.shape}; expected (images, height, width) or (images, height, "
        "width, channels) with 1, 3 or 4 channels"
    )


def _mean_and_std(
    config: DataConfig, pixels: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    channels = pixels.shape[1]
    if config.mean or config.std:
        if not len(config.mean) == len(config.std) == channels or min(config.std) <= 0:
            raise DataError(
                f"data.mean and data.std need {channels} numbers each, one a channel, and std "
                "above 0; leave both empty to measure them"
            )
        return config.mean, config.std
    counts = np.zeros((channels, 256))
    for start in range(0, len(pixels), MEASURED_TOGETHER):
        some = pixels[start : start + MEASURED_TOGETHER]
        for c in range(channels):
            counts[c] += np.bincount(some[:, c].ravel(), minlength=256)
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    std[std == 0] = 1.0  # a channel of one value carries nothing; any scale will do
    return tuple(mean.tolist()), tuple(std.tolist())
