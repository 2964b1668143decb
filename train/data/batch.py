"""Batches, and what a dataset offers to training and measuring.

Data is read without torch, so that a bundle can be measured where only its server is installed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a target that counts for nothing


class Batch(NamedTuple):
    """Rows and what is to be predicted of them."""

    inputs: "tuple[Tensor, ...]"  # tokens; pixels; points; or source and target: (B, ...)
    targets: "Tensor"  # (B,) classes, or (B, N) next tokens
    taught: "Tensor | None" = None  # (B, classes): logits of a teacher, if they were kept

    @property
    def rows(self) -> int:
        return len(self.targets)


def shuffled(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches in an order of chance, since those that are sorted begin with the shortest.

    The order is always the same.
    """
    found = list(batches)
    return (found[i] for i in np.random.default_rng(0).permutation(len(found)))


def as_tensor(array: npt.NDArray[Any]) -> "Tensor":
    """The array as a tensor of the same memory; the array itself where there is no torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return cast("Tensor", array)
    return torch.from_numpy(array)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model must know of its data."""

    vocabulary: int = 0
    classes: int = 0
    channels: int = 0  # of an image
    height: int = 0
    width: int = 0
    dimensions: int = 0  # of a point
    pad_id: int = 0  # of tokens
    length: int = 0  # tokens of every text, where all have as many


class Dataset(Protocol):
    digest: str  # of all rows: the same data, split and tokenizer

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def labels(self) -> tuple[str, ...] | None: ...

    @property
    def sizes(self) -> Sizes: ...

    def batch(self, iteration: int, size: int, seed: int) -> Batch: ...

    def held_out(self, size: int) -> Iterator[Batch]:
        """The split to report quality on, whole: the official test set if there is one."""
        ...

    def validation(self, size: int) -> Iterator[Batch]:
        """The split to watch while training: rows of the training data never trained on."""
        ...
