"""Labelled texts: rows of (ids, class), padded on the right and batched by length.

Knows ids and classes; tables and generators are others' business.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train.batch import Batch, Sizes
from train.config import DataConfig
from train.shuffle import Shuffle, digest_of, divide
from train.tables import DataError, Rows
from train.tokens import Ids, cut, ids_of, train_tokenizer

Row = tuple[Ids, int]
LONGEST_LABEL = 1000  # that a bundle takes
_log = logging.getLogger("stepdial")


class LabelledDataset:
    """Rows of (ids, class), padded on the right; an epoch is a permutation in length buckets."""

    def __init__(
        self,
        train: Rows,
        test: Rows | None,
        config: DataConfig,
        window: int,
        tokenizer: Tokenizer | None,
        seed: int,
    ) -> None:
        used, held = divide(len(train), config.held_out, seed)
        values = config.values or config.labels or tuple(sorted({label for _, label in train}))
        self.labels: tuple[str, ...] = config.labels or values
        if len(self.labels) != len(values) or len(set(self.labels)) != len(self.labels):
            raise DataError("data.labels must differ, and be as many as data.values")
        if len(values) < 2:
            if config.values or config.labels:
                raise DataError(f"data.values is {values[0]!r} alone: a classifier needs two")
            raise DataError(f"every row has the label {values[0]!r}: a classifier needs two")
        longest = max(self.labels, key=len)
        if len(longest) > LONGEST_LABEL:
            raise DataError(
                f"a label of {len(longest)} characters: {LONGEST_LABEL} at most. Is data.label, "
                f"{config.label!r}, the right column?"
            )
        if len(values) > max(2, len(train) / 2):
            raise DataError(
                f"{len(values)} different labels in {len(train)} rows: is data.label, "
                f"{config.label!r}, the right column?"
            )
        if len(used) == 0:
            raise DataError("no rows are left to train on: lower data.held_out or give more rows")
        unseen = set(values).difference(train[i][1] for i in used)
        if unseen:
            _log.warning(
                "no row to train on has the label %s: it will not be learnt; give more rows of it",
                ", ".join(sorted(unseen)),
            )
        learn_from = [train[i][0] for i in used]
        if config.tokenizer == "chars":  # what it does not know would be read as padding
            learn_from = [text for text, _ in (*train, *(test or ()))]
        self.pad_id = config.pad_id
        self.tokenizer = tokenizer or train_tokenizer(
            learn_from, config.tokenizer, config.vocabulary, config.lowercase
        )
        self._classes = {value: i for i, value in enumerate(values)}
        self._cut = (window, config.head, config.tail)
        self._used = self._pack([train[i] for i in used])
        self._held = self._pack([train[i] for i in held])
        self._test = self._held if test is None else self._pack(test)
        self.digest = digest_of(
            *(np.append(ids, label) for part in (self._used, self._held) for ids, label in part)
        )
        self._taught: Tensor | None = None  # (R, classes), in the order of training_rows
        self._shuffle = Shuffle([len(ids) for ids, _ in self._used])

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            vocabulary=self.tokenizer.get_vocab_size(),
            classes=len(self.labels),
            pad_id=self.pad_id,
        )

    @property
    def rows_to_train(self) -> int:
        return len(self._used)

    def _pack(self, rows: Rows) -> list[Row]:
        unknown = next((label for _, label in rows if label not in self._classes), None)
        if unknown is not None:
            raise DataError(
                f"label {unknown!r} is not one of {', '.join(self._classes)}; set data.values (as "
                "the file writes them) and data.labels (as they are shown)"
            )
        texts = (text for text, _ in rows)
        ids = [cut(each, *self._cut) for each in ids_of(self.tokenizer, texts)]
        lost = next((text for row, (text, _) in zip(ids, rows, strict=True) if not row.any()), None)
        if lost is not None:
            raise DataError(
                f"no character of {lost[:40]!r} is known to the tokenizer of this model"
            )
        return [(i, self._classes[label]) for i, (_, label) in zip(ids, rows, strict=True)]

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        at = self._shuffle.rows(iteration, size, seed)
        batch = pad([self._used[i] for i in at], self.pad_id)
        return batch if self._taught is None else batch._replace(taught=self._taught[at])

    def training_rows(self, size: int) -> Iterator[tuple[list[int], Batch]]:
        """All rows that are trained on, with their places, those of like length together."""
        order = sorted(range(len(self._used)), key=lambda i: len(self._used[i][0]))
        for start in range(0, len(order), size):
            at = order[start : start + size]
            yield at, pad([self._used[i] for i in at], self.pad_id)

    def teach(self, logits: Tensor) -> None:
        """Give every batch from now on a teacher's logits (R, classes), by the places of rows."""
        self._taught = logits

    def held_out(self, size: int) -> Iterator[Batch]:
        return in_order(self._test, size, self.pad_id)

    def validation(self, size: int) -> Iterator[Batch]:
        batches = list(in_order(self._held, size, self.pad_id))
        order = np.random.default_rng(0).permutation(len(batches))  # else the shortest come first
        return (batches[i] for i in order)


def pad(rows: list[Row], pad_id: int = 0) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    for i, (ids, _) in enumerate(rows):
        tokens[i, : len(ids)] = torch.from_numpy(ids)
    return Batch((tokens,), torch.tensor([label for _, label in rows]))


def in_order(rows: list[Row], size: int, pad_id: int = 0) -> Iterator[Batch]:
    ordered = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(ordered), size):
        yield pad(ordered[start : start + size], pad_id)
