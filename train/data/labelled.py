"""Texts with a label, and pairs of texts.

Batches hold rows of like length and are a function of (seed, iteration).
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from train.data.batch import IGNORED, Batch, Sizes, as_tensor, shuffled
from train.data.tables import DataError, Rows, Shuffle, digest_of, divide, read_text
from train.data.text import BEGIN, END, Ids, cut, ids_of, train_tokenizer
from train.recipe import DataConfig

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("stepdial")
Sentences = list[tuple[str, str]]
PairIds = list[tuple[list[int], list[int]]]


class PairDataset:
    """Pairs of sentences under one vocabulary for both languages."""

    labels: tuple[str, ...] | None = None

    def __init__(
        self,
        config: DataConfig,
        window: int,
        target_window: int,
        tokenizer: Tokenizer | None,
        seed: int,
    ) -> None:
        sentences = read_pairs(config, config.train or "train")
        if config.validation:
            held = read_pairs(config, config.validation)
        else:
            used, kept = divide(len(sentences), config.held_out, seed)
            held = [sentences[i] for i in kept]
            sentences = [sentences[i] for i in used]
        if not sentences:
            raise DataError("no pairs are left to train on: lower data.held_out or give more lines")
        # Source and reference of every pair of the held-out split, for BLEU.
        self.references = read_pairs(config, config.test) if config.test else held
        self.tokenizer = tokenizer or train_tokenizer(
            (side for pair in sentences for side in pair),
            "bpe",
            config.vocabulary,
            config.lowercase,
            (BEGIN, END),
        )
        self.begin, self.end = (self._id(token) for token in (BEGIN, END))
        self._most = (window, target_window - 1)  # room for the begin or the end
        self._used = self._encode(sentences, "to train on")
        self._held = self._encode(held, "to validate on")
        self._test = self._encode(self.references, "to test on") if config.test else self._held
        self.sizes = Sizes(vocabulary=self.tokenizer.get_vocab_size())
        self.digest = digest_of(
            *(np.array([*s, -1, *t]) for pairs in (self._used, self._held) for s, t in pairs)
        )
        self._shuffle = Shuffle([len(source) + len(target) for source, target in self._used])

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"the tokenizer has no {token}: it was not made for translation")
        return int(found)

    def _encode(self, sentences: Sentences, purpose: str) -> PairIds:
        sides = (self.tokenizer.encode_batch(list(side)) for side in zip(*sentences, strict=True))
        pairs = [(s.ids, t.ids) for s, t in zip(*sides, strict=True)]
        kept = [p for p in pairs if len(p[0]) <= self._most[0] and len(p[1]) <= self._most[1]]
        if not kept:
            raise DataError(
                f"no pair {purpose} fits into model.window {self._most[0]} and model.target_window "
                f"{self._most[1] + 1}: raise them"
            )
        if len(kept) < len(pairs):
            _log.warning(
                "left out %d of %d pairs %s: longer than model.window or model.target_window",
                len(pairs) - len(kept),
                len(pairs),
                purpose,
            )
        return kept

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        return self._pad([self._used[i] for i in self._shuffle.rows(iteration, size, seed)])

    def held_out(self, size: int) -> Iterator[Batch]:
        return self._in_order(self._test, size)

    def validation(self, size: int) -> Iterator[Batch]:
        return shuffled(self._in_order(self._held, size))

    def _in_order(self, pairs: PairIds, size: int) -> Iterator[Batch]:
        ordered = sorted(pairs, key=lambda pair: len(pair[1]))
        for start in range(0, len(ordered), size):
            yield self._pad(ordered[start : start + size])

    def _pad(self, pairs: PairIds) -> Batch:
        source = _padded([s for s, _ in pairs], 0)  # (B, S)
        target = _padded([[self.begin, *t] for _, t in pairs], 0)  # (B, N)
        following = _padded([[*t, self.end] for _, t in pairs], IGNORED)  # (B, N)
        return Batch((source, target), following)


def _padded(rows: list[list[int]], fill: int) -> "Tensor":
    padded = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for i, ids in enumerate(rows):
        padded[i, : len(ids)] = ids
    return as_tensor(padded)


def read_pairs(config: DataConfig, name: str) -> Sentences:
    """The pairs of one split whose both sides have text."""
    first, second = (_path(config, name, language) for language in config.languages)
    sources, targets = _lines(first), _lines(second)
    if len(sources) != len(targets):
        raise DataError(
            f"{first} has {len(sources)} lines, but {second} {len(targets)}: line i of one must be "
            "the translation of line i of the other"
        )
    pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s.strip() and t.strip()]
    if len(pairs) < len(sources):
        _log.warning("%s: left out %d pairs with an empty side", first, len(sources) - len(pairs))
    if not pairs:
        raise DataError(f"{first}: no lines")
    return pairs


def _path(config: DataConfig, name: str, language: str) -> Path:
    file = f"{name}.{language}"
    if not config.path:
        raise DataError(
            f"this recipe needs parallel text: pass --data FOLDER, where {file} or {file}.gz is"
        )
    for path in (Path(config.path, file), Path(config.path, file + ".gz")):
        if path.is_file():
            return path
    raise DataError(
        f"{Path(config.path, file)} does not exist, nor with .gz: pass --data FOLDER, where it is, "
        f"or set data.train, data.validation, data.test and data.languages"
    )


def _lines(path: Path) -> list[str]:
    lines = read_text(path).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


# Labelled texts: rows of (ids, class), padded on the right and batched by length.


Row = tuple[Ids, int]
LONGEST_LABEL = 1000  # that a bundle takes


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
                f"a label of {len(longest)} characters: {LONGEST_LABEL} at most. Is --label "
                f"{config.label} the right column?"
            )
        found = not (config.values or config.labels)  # else they may be more than this table has
        if found and len(values) > max(2, len(train) / 2):
            raise DataError(
                f"{len(values)} different labels in {len(train)} rows: is --label {config.label} "
                "the right column? Each number is a class of its own: there is no regression"
            )
        if len(used) == 0:
            raise DataError("no rows are left to train on: lower data.held_out or give more rows")
        learn_from = [train[i][0] for i in used]
        if config.tokenizer == "chars":  # what it does not know would be read as padding
            learn_from = [text for text, _ in (*train, *(test or ()))]
        self.pad_id = config.pad_id
        self.tokenizer = tokenizer or train_tokenizer(
            learn_from, config.tokenizer, config.vocabulary, config.lowercase
        )
        self._classes = {value: i for i, value in enumerate(values)}
        self._cut = (window, config.head, config.tail)
        self._longer = 0  # texts that were cut so far
        self._used = self._pack([train[i] for i in used])
        self.longer = self._longer  # texts to train on that were cut
        self._held = self._pack([train[i] for i in held])
        self._test = self._held if test is None else self._pack(test)
        self.digest = digest_of(
            *(np.append(ids, label) for part in (self._used, self._held) for ids, label in part)
        )
        self._taught: Tensor | None = None  # (R, classes), in the order of training_rows
        self._shuffle = Shuffle([len(ids) for ids, _ in self._used])

    @property
    def class_counts(self) -> list[int]:
        """Rows to train on of each class."""
        counts = np.bincount([label for _, label in self._used], minlength=len(self.labels))
        return [int(count) for count in counts]

    def warn_of_unseen(self) -> None:
        """Say what a training will not see: the rest of long texts, classes without rows."""
        if self.longer:
            _log.warning(
                "%d of the %d texts to train on have more than %d tokens and are cut: %s would "
                "keep more of them",
                self.longer,
                len(self._used),
                len(max((ids for ids, _ in self._used), key=len)),
                "larger data.head and data.tail (together no more than model.window)"
                if any(self._cut[1:])
                else "a larger model.window (of `convert` --max-tokens)",
            )
        unseen = [
            label for label, rows in zip(self.labels, self.class_counts, strict=True) if not rows
        ]
        if unseen:
            _log.warning(
                "no row to train on has the label %s: it will not be learnt; give more rows of it",
                ", ".join(unseen),
            )

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
                f"label {unknown!r} is not one of {', '.join(self._classes)}: use a table with "
                "these labels; in training data.values says how the file writes them, data.labels "
                "how they are shown"
            )
        texts = (text for text, _ in rows)
        ids: list[Ids] = []
        for each in ids_of(self.tokenizer, texts):
            ids.append(cut(each, *self._cut))
            self._longer += len(ids[-1]) < len(each)
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

    def teach(self, logits: "Tensor") -> None:
        """Give every batch from now on a teacher's logits (R, classes), by the places of rows."""
        self._taught = logits

    def held_out(self, size: int) -> Iterator[Batch]:
        return in_order(self._test, size, self.pad_id)

    def validation(self, size: int) -> Iterator[Batch]:
        return shuffled(in_order(self._held, size, self.pad_id))


def pad(rows: list[Row], pad_id: int = 0) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    tokens = np.full((len(rows), longest), pad_id, np.int64)
    for i, (ids, _) in enumerate(rows):
        tokens[i, : len(ids)] = ids
    classes = np.array([label for _, label in rows], np.int64)
    return Batch((as_tensor(tokens),), as_tensor(classes))


def in_order(rows: list[Row], size: int, pad_id: int = 0) -> Iterator[Batch]:
    ordered = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(ordered), size):
        yield pad(ordered[start : start + size], pad_id)
