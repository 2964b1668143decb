"""What training and measuring exchange: batches, and what a dataset promises.

Knows neither files nor models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer
from torch import Tensor

IGNORED = -100  # a target that counts for nothing


class Batch(NamedTuple):
    """Rows and what is to be predicted of them."""

    inputs: tuple[Tensor, ...]  # (tokens,), (pixels,), (points,) or (source, target): (B, ...) each
    targets: Tensor  # (B,) classes, or (B, N) next tokens
    taught: Tensor | None = None  # (B, classes): logits of a teacher, if they were kept

    @property
    def rows(self) -> int:
        return len(self.targets)


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
