"""Texts with one label a word: files of them, and the data set that a tagger learns from.

A file is .jsonl, with a list of words and a list of labels of the same length in each row, or
CoNLL: a word a line, its columns separated by tabs, or by spaces where there is no tab, and an
empty line behind each text. A word's label stands at its first token; its other tokens count for
nothing.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from train.data.batch import IGNORED, Batch, Sizes, as_tensor, shuffled
from train.data.tables import (
    UNREADABLE,
    DataError,
    Shuffle,
    digest_of,
    divide,
    is_missing,
    not_utf8,
    open_text,
    plain_name,
    plain_text,
    table_path,
)
from train.data.text import Ids, train_tokenizer
from train.recipe import DataConfig

_log = logging.getLogger("stepdial")

# In CoNLL-U, the numbers of lines beside the words: several at once (4-5), one left out (5.1).
_BESIDE = re.compile(r"\d+[-.]\d+")
_CONLL_U_COLUMNS = 10


class Tagged(NamedTuple):
    """A text as words, and the label of each; a word without one is None."""

    words: Sequence[str]
    labels: Sequence[str | None]


class TaggedRow(NamedTuple):
    ids: Ids  # (N,)
    targets: Ids  # (N,)


def read_tags(config: DataConfig, name: str) -> list[Tagged]:
    """The texts of one file; `data.text` and `data.label` name its columns."""
    path = table_path(config, name)
    if plain_name(path).suffix.lower() == ".csv":
        raise DataError(
            f"{path}: a label for each word comes as .jsonl or in CoNLL format; for a label a row "
            "use the recipe classifier"
        )
    try:
        with open_text(path) as file:
            lines = enumerate(file, 1)
            if plain_name(path).suffix.lower() in (".jsonl", ".json"):
                rows = [
                    _from_json(line, config, f"{path}, line {n}")
                    for n, line in lines
                    if line.strip()
                ]
            else:
                rows = list(_from_conll(lines, config, str(path)))
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _from_json(line: str, config: DataConfig, where: str) -> Tagged:
    try:
        record = json.loads(line)
        words, labels = record[config.text[0]], record[config.label]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DataError(
            f'{where}: expected an object with the lists "{config.text[0]}" and "{config.label}": '
            "set data.text and data.label to the names of its columns"
        ) from None
    if not (isinstance(words, list) and isinstance(labels, list) and len(words) == len(labels) > 0):
        raise DataError(f"{where}: expected as many labels as words, each a list that is not empty")
    if any(map(is_missing, words)):
        raise DataError(f"{where}: a word is null; give it a text or remove it with its label")
    return Tagged(
        [plain_text(word, f"{where}: a word") for word in words],
        [_label(label, f"{where}: a label") for label in labels],
    )


def _label(value: object, what: str) -> str | None:
    """A label as in tables of texts: without spaces around it, and none where nothing is left."""
    return None if is_missing(value) else plain_text(value, what).strip() or None


def _from_conll(
    lines: Iterator[tuple[int, str]], config: DataConfig, where: str
) -> Iterator[Tagged]:
    at = config.text[0] if config.text[0].isdecimal() else "0"
    label_at = config.label if config.label.lstrip("-").isdecimal() else "-1"  # the last column
    words: list[str] = []
    labels: list[str | None] = []
    for number, line in lines:
        line = line.strip()
        # Between tabs a word may hold spaces, as in "10 000".
        cells = re.split(r"\s*\t\s*" if "\t" in line else " +", line) if line else []
        if "\t" in line and len(cells) == _CONLL_U_COLUMNS and _BESIDE.fullmatch(cells[0]):
            continue
        comment = not words and line.split()[:1] == ["#"]  # within a text, # is a word like others
        if cells and cells[0] != "-DOCSTART-" and not comment:
            word, label = int(at), int(label_at)
            label += len(cells) if label < 0 else 0
            # A word alone would be its own label.
            if word == label or word >= len(cells) or not 0 <= label < len(cells):
                raise DataError(
                    f"{where}, line {number}: {len(cells)} columns, but the word is expected in "
                    f"column {at} and its label in {label_at}: set data.text and data.label"
                )
            words.append(cells[word])
            labels.append(cells[label])
        elif words:
            yield Tagged(words, labels)
            words, labels = [], []
    if words:
        yield Tagged(words, labels)


class TagDataset:
    """Rows of ids and targets, padded on the right and batched by length.

    With `first_only` quality is that of the first label of each text; training learns them all.
    """

    def __init__(
        self,
        train: list[Tagged],
        test: list[Tagged] | None,
        config: DataConfig,
        window: int,
        tokenizer: Tokenizer | None,
        seed: int,
        first_only: bool = False,
    ) -> None:
        used, held = divide(len(train), config.held_out, seed)
        if len(used) == 0:
            raise DataError("no rows are left to train on: lower data.held_out or give more rows")
        found = {label for row in train for label in row.labels if label is not None}
        values = config.values or config.labels or tuple(sorted(found))
        self.labels: tuple[str, ...] = config.labels or values
        if len(self.labels) != len(values) or len(set(self.labels)) != len(values):
            raise DataError("data.labels must differ, and be as many as data.values")
        if len(values) < 2:
            raise DataError(f"every word has the label {', '.join(values)}: a tagger needs two")
        learn_from = [" ".join(train[i].words) for i in used]
        if config.tokenizer == "chars":
            learn_from = [" ".join(row.words) for row in (*train, *(test or ()))]
        self.tokenizer = tokenizer or train_tokenizer(
            learn_from, config.tokenizer, config.vocabulary, config.lowercase
        )
        self._classes = {value: i for i, value in enumerate(values)}
        self._window, self._first_only = window, first_only
        self._longer = 0  # texts that were cut so far
        self._used = self._pack([train[i] for i in used])
        self.longer = self._longer  # texts to train on that were cut
        self._held = self._pack([train[i] for i in held])
        self._test = self._held if test is None else self._pack(test)
        self.digest = digest_of(*(part for row in (*self._used, *self._held) for part in row))
        self._shuffle = Shuffle([len(row.ids) for row in self._used])

    def warn_of_unseen(self) -> None:
        """Say what a training and its measures will not see: the rest of long texts."""
        if self.longer:
            _log.warning(
                "%d of the %d texts to train on have more than %d tokens and are cut; the rest is "
                "not measured either: a larger model.window reads more of them",
                *(self.longer, len(self._used), self._window),
            )

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.tokenizer.get_vocab_size(), classes=len(self.labels))

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        return _pad([self._used[i] for i in self._shuffle.rows(iteration, size, seed)])

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return shuffled(self._in_order(self._held, size))

    def _in_order(self, rows: list[TaggedRow], size: int) -> Iterator[Batch]:
        ordered = sorted(rows, key=lambda row: len(row.ids))
        for start in range(0, len(ordered), size):
            batch = _pad(ordered[start : start + size])
            yield _first(batch) if self._first_only else batch

    def _pack(self, rows: list[Tagged]) -> list[TaggedRow]:
        encoded = self.tokenizer.encode_batch([" ".join(row.words) for row in rows])
        packed = [
            self._row(row, each.ids, each.offsets) for row, each in zip(rows, encoded, strict=True)
        ]
        labelled = [row for row in packed if (row.targets != IGNORED).any()]
        if packed and not labelled:
            raise DataError(
                f"of {len(packed)} texts to train or to measure on none has a label within the "
                f"first {self._window} tokens: give more rows, or a larger model.window"
            )
        return labelled

    def _row(self, row: Tagged, ids: list[int], offsets: list[tuple[int, int]]) -> TaggedRow:
        ends = np.cumsum([len(word) + 1 for word in row.words])  # each with the space behind it
        targets = np.full(len(ids), IGNORED, np.int32)
        begun = -1
        for place, (start, end) in enumerate(offsets):
            word = int(np.searchsorted(ends, end - 1, side="right"))  # of its last character
            if end > start and word > begun and word < len(row.words):
                targets[place] = self._class_of(row.labels[word])
                begun = word
        self._longer += len(ids) > self._window
        return TaggedRow(np.array(ids[: self._window], np.int32), targets[: self._window])

    def _class_of(self, label: str | None) -> int:
        if label is None:
            return IGNORED
        if label not in self._classes:
            raise DataError(
                f"label {label!r} is not one of {', '.join(self._classes)}: use a table with "
                "these labels; in training data.values says how the file writes them, data.labels "
                "how they are shown"
            )
        return self._classes[label]


def _pad(rows: list[TaggedRow]) -> Batch:
    longest = max(len(row.ids) for row in rows)
    tokens = np.zeros((len(rows), longest), np.int64)
    targets = np.full((len(rows), longest), IGNORED, np.int64)
    for i, (ids, labels) in enumerate(rows):
        tokens[i, : len(ids)] = ids
        targets[i, : len(ids)] = labels
    return Batch((as_tensor(tokens),), as_tensor(targets))  # (B, N) both


def _first(batch: Batch) -> Batch:
    """The same rows with their first target only."""
    targets = np.asarray(batch.targets)
    counted = targets != IGNORED
    first = counted & (counted.cumsum(1) == 1)
    return Batch(batch.inputs, as_tensor(np.where(first, targets, IGNORED)))
