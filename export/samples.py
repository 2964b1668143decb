"""Real held-out inputs in any shape: what graphs are traced and verified with.

Knows the kinds of inputs; not the models that take them.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from train.data.arrays import unit_sphere
from train.data.batch import Dataset

ENOUGH_TOKENS, ENOUGH_ROWS = 20_000, 64
Inputs = tuple[Tensor, ...]


class Samples(Protocol):
    """Draws inputs of a data set."""

    def draw(self, rows: int, length: int) -> Inputs:
        """So many rows of so many tokens or points; images have the one size they have."""
        ...

    def edges(self) -> list[Inputs]:
        """The shapes at the edges: least, whole, one row and several."""
        ...


def samples_of(dataset: Dataset, most: int, target_most: int) -> Samples:
    """What draws from a data set; `most` tokens or points a row, and so many of an answer."""
    if dataset.sizes.channels:
        return ImageSamples(dataset)
    if dataset.sizes.dimensions:
        return PointSamples(dataset, most)
    if dataset.labels is None and len(next(iter(dataset.held_out(1))).inputs) == 2:
        return PairSamples(dataset, most, target_most)
    return TokenSamples(dataset, most)


class TokenSamples:
    """Rows joined end to end; those of a classifier get padding on their right."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.most, self.ragged = most, dataset.labels is not None
        self._pad_id = dataset.sizes.pad_id
        self._stream = _stream(dataset, 0)

    def draw(self, rows: int, length: int) -> Inputs:
        tokens = _rows(self._stream, rows, length)
        return (_ragged(tokens, self._pad_id) if self.ragged else tokens,)

    def edges(self) -> list[Inputs]:
        return _edges(self, self.most)


class PairSamples:
    """Sources with padding on their right, and answers that begin as the data's do."""

    def __init__(self, dataset: Dataset, most: int, target_most: int) -> None:
        self.most, self.target_most = most, target_most
        self._sources, self._targets = _stream(dataset, 0), _stream(dataset, 1)
        self._begin = next(iter(dataset.held_out(1))).inputs[1][0, 0]  # ()

    def draw(self, rows: int, length: int) -> Inputs:
        return self._pair(rows, length, min(length + 1, self.target_most))

    def edges(self) -> list[Inputs]:
        return [*_edges(self, self.most), self._pair(2, min(5, self.most), self.target_most)]

    def _pair(self, rows: int, length: int, target_length: int) -> Inputs:
        source = _ragged(_rows(self._sources, rows, length))  # (B, S)
        target = _rows(self._targets, rows, target_length).clone()  # (B, N)
        target[:, 0] = self._begin
        return source, target


class ImageSamples:
    """Images as they are."""

    def __init__(self, dataset: Dataset) -> None:
        self._pixels = _some(dataset)  # (P, C, H, W)

    def draw(self, rows: int, length: int) -> Inputs:
        return (self._pixels[torch.arange(rows) % len(self._pixels)],)

    def edges(self) -> list[Inputs]:
        return [self.draw(1, 1), self.draw(3, 1)]


class PointSamples:
    """Clouds of any number of points, centred and scaled again."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.most = most
        self._clouds = _some(dataset).numpy()  # (P, N, d)

    def draw(self, rows: int, length: int) -> Inputs:
        clouds = self._clouds[np.arange(rows) % len(self._clouds)]
        some = clouds[:, np.arange(length) % clouds.shape[1]]  # (B, length, d)
        return (torch.from_numpy(unit_sphere(some)),)

    def edges(self) -> list[Inputs]:
        return _edges(self, self.most)


def _edges(samples: Samples, most: int) -> list[Inputs]:
    shapes = sorted({(1, 1), (3, min(17, most)), (1, most)})
    return [samples.draw(rows, length) for rows, length in shapes]


def _stream(dataset: Dataset, which: int) -> Tensor:
    """The tokens of one of the inputs, one row after another."""
    pieces: list[Tensor] = []
    for batch in dataset.held_out(8):
        tokens = batch.inputs[which]
        pieces.append(tokens[tokens != dataset.sizes.pad_id])
        if sum(map(len, pieces)) > ENOUGH_TOKENS:
            break
    return torch.cat(pieces)


def _some(dataset: Dataset) -> Tensor:
    return next(iter(dataset.held_out(ENOUGH_ROWS))).inputs[0]


def _rows(stream: Tensor, rows: int, length: int) -> Tensor:
    return stream[torch.arange(rows * length) % len(stream)].view(rows, length)


def _ragged(tokens: Tensor, pad_id: int = 0) -> Tensor:
    """Every row a quarter shorter than the one before; none is empty."""
    rows, length = tokens.shape
    keep = (length - torch.arange(rows) * (length // 4)).clamp(min=1)  # (B,)
    return tokens.where(torch.arange(length) < keep[:, None], pad_id)
