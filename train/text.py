"""A corpus of text as windows of ids, drawn at random in training.

Knows ids and windows; not where the text came from.
"""

from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train.batch import Batch, Sizes
from train.config import DataConfig
from train.corpus import Corpus, divided
from train.shuffle import digest_of
from train.tables import DataError
from train.tokens import ids_of, train_tokenizer


class TextDataset:
    """The ids of a corpus; of a text without parts of its own, the last share is held out."""

    labels: tuple[str, ...] | None = None

    def __init__(
        self, text: str | Corpus, config: DataConfig, window: int, tokenizer: Tokenizer | None
    ) -> None:
        corpus = text if isinstance(text, Corpus) else divided(text, config.held_out)
        learn_from = list(corpus) if config.tokenizer == "chars" else [corpus.train]
        self.tokenizer = tokenizer or train_tokenizer(
            learn_from, config.tokenizer, config.vocabulary, config.lowercase
        )
        self.window = window
        self.train_ids = self._encode(corpus.train)
        self.validation_ids = self._encode(corpus.validation)
        same = corpus.test == corpus.validation
        self.held_ids = self.validation_ids if same else self._encode(corpus.test)
        self.digest = digest_of(self.train_ids.numpy(), self.validation_ids.numpy())
        parts = (self.train_ids, self.validation_ids, self.held_ids)
        self.knows_all = all(bool(part.all()) for part in parts)  # else some is read as padding
        lengths = [len(part) for part in parts]
        if min(lengths) <= window + 1:
            raise DataError(
                f"the corpus is too short: its parts have {lengths} tokens, but "
                f"each needs more than model.window = {window}. Give more text or a smaller window."
            )

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.tokenizer.get_vocab_size())

    def _encode(self, text: str) -> Tensor:
        ids = np.concatenate(list(ids_of(self.tokenizer, _pieces(text))))
        return torch.from_numpy(ids.astype(np.int64))

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        return drawn_windows(self.train_ids, self.window, iteration, size, seed)

    def held_out(self, size: int) -> Iterator[Batch]:
        return windows_in_order(self.held_ids, self.window, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return windows_in_order(self.validation_ids, self.window, size)


def drawn_windows(ids: Tensor, window: int, iteration: int, size: int, seed: int) -> Batch:
    """Windows that begin anywhere: a function of (seed, iteration)."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + iteration)
    starts = torch.randint(len(ids) - window - 1, (size,), generator=draw)
    rows = torch.stack([ids[s : s + window + 1] for s in starts.tolist()])  # (B, N + 1)
    return Batch((rows[:, :-1],), rows[:, 1:])


def windows_in_order(ids: Tensor, window: int, size: int) -> Iterator[Batch]:
    """Windows side by side, in batches of `size`."""
    windows = (len(ids) - 1) // window
    for first in range(0, windows, size):
        starts = [i * window for i in range(first, min(first + size, windows))]
        rows = torch.stack([ids[s : s + window + 1] for s in starts])  # (B, N + 1)
        yield Batch((rows[:, :-1],), rows[:, 1:])


def _pieces(text: str, size: int = 100_000) -> list[str]:
    """A text in pieces that end where a line does: no word is in two of them."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces
