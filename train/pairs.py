"""Parallel text: two files of lines a split, line by line translations of each other.

Batches hold pairs of like length and are a function of (seed, iteration). Knows ids, not models.
"""

import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train.batch import IGNORED, Batch, Sizes
from train.config import DataConfig
from train.shuffle import Shuffle, digest_of, divide
from train.tables import DataError
from train.tokens import BEGIN, END, train_tokenizer

_log = logging.getLogger("stepdial")
Sentences = list[tuple[str, str]]
Ids = list[tuple[list[int], list[int]]]


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

    def _encode(self, sentences: Sentences, purpose: str) -> Ids:
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
        batches = list(self._in_order(self._held, size))
        order = np.random.default_rng(0).permutation(len(batches))  # else the shortest come first
        return (batches[i] for i in order)

    def _in_order(self, pairs: Ids, size: int) -> Iterator[Batch]:
        ordered = sorted(pairs, key=lambda pair: len(pair[1]))
        for start in range(0, len(ordered), size):
            yield self._pad(ordered[start : start + size])

    def _pad(self, pairs: Ids) -> Batch:
        source = _padded([s for s, _ in pairs], 0)  # (B, S)
        target = _padded([[self.begin, *t] for _, t in pairs], 0)  # (B, N)
        following = _padded([[*t, self.end] for _, t in pairs], IGNORED)  # (B, N)
        return Batch((source, target), following)


def _padded(rows: list[list[int]], fill: int) -> Tensor:
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.int64)
    for i, ids in enumerate(rows):
        padded[i, : len(ids)] = torch.tensor(ids)
    return padded


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
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}); convert it first") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Is the file whole?") from None
    return lines[:-1] if lines[-1] == "" else lines
