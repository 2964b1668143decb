"""Datasets: batches that are a function of (seed, iteration), so that a run can resume anywhere.

A dataset owns its tokenizer and its splits. It does not know models or objectives.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train import generators
from train.config import DataConfig, ModelConfig, Recipe
from train.tables import DataError, Rows, read_table
from train.tokens import PAD, cut, train_tokenizer

POOL_BATCHES = 50  # batches sorted by length together, so that padding is small


class Batch(NamedTuple):
    tokens: Tensor  # (B, N)
    targets: Tensor  # (B, N) next tokens, or (B,) classes


class Dataset(Protocol):
    tokenizer: Tokenizer
    digest: str  # of all ids and classes: the same data, split and tokenizer

    @property
    def labels(self) -> tuple[str, ...] | None: ...

    def batch(self, iteration: int, size: int, seed: int) -> Batch: ...

    def held_out(self, size: int) -> Iterator[Batch]:
        """The split to report quality on, whole: the official test set if there is one."""
        ...

    def validation(self, size: int) -> Iterator[Batch]:
        """The split to watch while training: rows of the training data never trained on."""
        ...


class TextDataset:
    """A corpus of ids, its last part held out; windows are drawn at random in training."""

    labels: tuple[str, ...] | None = None

    def __init__(self, text: str, config: DataConfig, window: int, tokenizer: Tokenizer | None):
        cutoff = int(len(text) * (1 - config.held_out))
        learn_from = text if config.tokenizer == "chars" else text[:cutoff]
        self.tokenizer = tokenizer or train_tokenizer(
            [learn_from], config.tokenizer, config.vocabulary, config.lowercase
        )
        self.window = window
        self.train_ids = self._encode(text[:cutoff])
        self.held_ids = self._encode(text[cutoff:])
        self.digest = _digest(self.train_ids.numpy(), self.held_ids.numpy())
        if len(self.train_ids) <= window + 1 or len(self.held_ids) <= window + 1:
            raise DataError(
                f"the corpus is too short: {len(text)} characters, but both parts need more than "
                f"model.window = {window} tokens. Give more text or a smaller window."
            )

    def _encode(self, text: str) -> Tensor:
        pieces = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
        ids = [i for e in self.tokenizer.encode_batch(pieces) for i in e.ids]
        return torch.tensor(ids, dtype=torch.int64)

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + iteration)
        starts = torch.randint(len(self.train_ids) - self.window - 1, (size,), generator=draw)
        rows = torch.stack([self.train_ids[s : s + self.window + 1] for s in starts.tolist()])
        return Batch(rows[:, :-1], rows[:, 1:])

    def held_out(self, size: int) -> Iterator[Batch]:
        windows = (len(self.held_ids) - 1) // self.window
        for first in range(0, windows, size):
            starts = [i * self.window for i in range(first, min(first + size, windows))]
            rows = torch.stack([self.held_ids[s : s + self.window + 1] for s in starts])
            yield Batch(rows[:, :-1], rows[:, 1:])

    validation = held_out


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
        order = np.random.default_rng(seed).permutation(len(train))
        kept = max(1, int(len(train) * config.held_out))
        held, used = order[:kept], order[kept:]
        values = config.values or config.labels or tuple(sorted({label for _, label in train}))
        self.labels: tuple[str, ...] = config.labels or values
        if len(self.labels) != len(values) or len(set(self.labels)) != len(self.labels):
            raise DataError("data.labels must differ, and be as many as data.values")
        if len(values) < 2:
            raise DataError(f"every row has the label {values[0]!r}: a classifier needs two")
        if len(used) == 0:
            raise DataError("no rows are left to train on: lower data.held_out or give more rows")
        self.tokenizer = tokenizer or train_tokenizer(
            [train[i][0] for i in used], "bpe", config.vocabulary, config.lowercase
        )
        self._classes = {value: i for i, value in enumerate(values)}
        self._cut = (window, config.head, config.tail)
        self._used = self._pack([train[i] for i in used])
        self._held = self._pack([train[i] for i in held])
        self._test = self._held if test is None else self._pack(test)
        self.digest = _digest(
            *(np.array([*ids, label]) for part in (self._used, self._held) for ids, label in part)
        )
        self._epochs: dict[tuple[int, int, int], list[np.ndarray]] = {}

    def _pack(self, rows: Rows) -> list[tuple[list[int], int]]:
        unknown = next((label for _, label in rows if label not in self._classes), None)
        if unknown is not None:
            raise DataError(
                f"label {unknown!r} is not one of {', '.join(self._classes)}; set data.values (as "
                "the file writes them) and data.labels (as they are shown)"
            )
        encoded = self.tokenizer.encode_batch([text for text, _ in rows])
        ids = [cut(e.ids, *self._cut) for e in encoded]
        return [(i, self._classes[label]) for i, (_, label) in zip(ids, rows, strict=True)]

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        per_epoch = max(1, len(self._used) // size)
        epoch, index = divmod(iteration, per_epoch)
        key = (epoch, size, seed)
        if key not in self._epochs:
            self._epochs = {key: self._epoch(epoch, size, seed)}
        return pad([self._used[i] for i in self._epochs[key][index]])

    def _epoch(self, epoch: int, size: int, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng((seed, epoch))
        order = draw.permutation(len(self._used))
        batches: list[np.ndarray] = []
        for start in range(0, len(order), size * POOL_BATCHES):
            pool = order[start : start + size * POOL_BATCHES]
            pool = pool[np.argsort([len(self._used[i][0]) for i in pool], kind="stable")]
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        if len(batches) > 1:
            batches = [b for b in batches if len(b) == size]
        return [batches[i] for i in draw.permutation(len(batches))]

    def held_out(self, size: int) -> Iterator[Batch]:
        return _in_order(self._test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        batches = list(_in_order(self._held, size))
        order = np.random.default_rng(0).permutation(
            len(batches)
        )  # the first ones are the shortest
        return (batches[i] for i in order)


def _digest(*parts: np.ndarray) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.astype(np.int32).tobytes() + b";")
    return digest.hexdigest()


def pad(rows: list[tuple[list[int], int]]) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, (ids, _) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids)
    return Batch(tokens, torch.tensor([label for _, label in rows]))


def _in_order(rows: list[tuple[list[int], int]], size: int) -> Iterator[Batch]:
    ordered = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(ordered), size):
        yield pad(ordered[start : start + size])


def open_dataset(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Dataset:
    """The dataset of a recipe; a resumed run passes the tokenizer that it kept."""
    data, model = recipe.data, recipe.model
    check_window(data, model)
    if data.kind in ("text", "stdlib"):
        return TextDataset(_corpus(data), data, model.window, tokenizer)
    train, test = _labelled_rows(data, recipe.run.seed)
    return LabelledDataset(train, test, data, model.window, tokenizer, recipe.run.seed)


def _corpus(data: DataConfig) -> str:
    if data.kind == "stdlib":
        return generators.stdlib_text()
    path = Path(data.path)
    if not data.path or not path.exists():
        raise DataError(
            f"{data.path or 'no corpus'}: pass --data FILE.txt, any plain text of 10 kB or more"
        )
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no .txt files there")
    try:
        return "\n".join(file.read_text(encoding="utf-8-sig") for file in files)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _labelled_rows(data: DataConfig, seed: int) -> tuple[Rows, Rows | None]:
    if data.kind == "parity":
        return generators.parity(data.longest, data.rows, seed)
    if data.kind == "listops":
        return generators.listops(data.longest, data.rows, seed)
    name = data.train or "train.csv"
    return read_table(data, name), read_table(data, data.test) if data.test else None


def vocabulary_of(dataset: Dataset) -> int:
    assert dataset.tokenizer.token_to_id(PAD) == 0
    return int(dataset.tokenizer.get_vocab_size())


def check_window(data: DataConfig, model: ModelConfig) -> None:
    if data.kind in ("parity", "listops") and data.longest + 2 > model.window:
        raise DataError(f"model.window {model.window} is too small for data.longest {data.longest}")
