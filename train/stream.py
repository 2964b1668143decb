"""Text that is read as it comes: a data set of the Hugging Face Hub, or files too large for memory.

The first documents are read at the start: a share of them is held out, the others teach the
tokenizer. Training takes the stream in portions, in its own order, and draws windows at random from
one portion after another, about as many as it has. So a batch is a function of (seed, iteration): a
resumed run reads the stream again up to where it was, without encoding it. Knows no models.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from train.batch import Batch, Sizes
from train.config import DataConfig
from train.shuffle import digest_of
from train.tables import DataError
from train.text import drawn_windows, windows_in_order
from train.tokens import plain, train_tokenizer

DEFAULT = "Skylion007/openwebtext"
OPENING_DOCUMENTS = 10_000
PORTION_CHARACTERS = 10_000_000
END_OF_TEXT = "<|endoftext|>"  # between documents, as GPT-2 writes it


class StreamDataset:
    """Windows of ids from portions of a stream of documents."""

    labels: tuple[str, ...] | None = None
    _portion: list[str]  # the documents that batches are drawn from, `_ids` in ids
    _portions: Iterator[list[str]]  # those to come
    _first: int  # the iteration at which it began
    _size: int  # rows of a batch

    def __init__(self, config: DataConfig, window: int, tokenizer: Tokenizer | None) -> None:
        self.window, self._source = window, config.path or DEFAULT
        opening = list(itertools.islice(documents(self._source), OPENING_DOCUMENTS))
        self._held = max(1, round(len(opening) * config.held_out))
        if len(opening) < 2:
            raise DataError(f"{self._source}: a stream needs two documents at least")
        self.tokenizer = tokenizer or _tokenizer(config, opening[self._held :])
        self.held_ids = self._encode(opening[: self._held])
        self._characters_per_token = sum(map(len, opening[: self._held])) / len(self.held_ids)
        self._restart(0)
        self._ids = self._encode(self._portion)
        self.digest = digest_of(self._ids.numpy(), self.held_ids.numpy())
        if min(len(self._ids), len(self.held_ids)) <= window + 1:
            raise DataError(
                f"{self._source} is too short: its first {self._held} documents, which are held "
                f"out, and the rest need more than model.window = {window} tokens each. Give more "
                "text, a larger data.held_out or a smaller window."
            )

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.tokenizer.get_vocab_size())

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        encoded = self._portion
        if size != self._size or iteration < self._first:
            self._restart(size)
        while iteration >= self._first + self._iterations:
            self._first += self._iterations
            self._portion = next(self._portions)
        if self._portion != encoded:
            self._ids = self._encode(self._portion)
        return drawn_windows(self._ids, self.window, iteration, size, seed)

    def held_out(self, size: int) -> Iterator[Batch]:
        return windows_in_order(self.held_ids, self.window, size)

    validation = held_out

    def _restart(self, size: int) -> None:
        """Go back to the first portion, for batches of `size` rows."""
        self._size, self._first = size, 0
        self._portions = self._read()
        self._portion = next(self._portions)

    @property
    def _iterations(self) -> int:
        """How many batches are drawn from the portion: as many as it fills."""
        tokens = sum(map(len, self._portion)) / self._characters_per_token
        return max(1, int(tokens / (self._size * self.window)))

    def _read(self) -> Iterator[list[str]]:
        """The documents that are not held out, over and over; a short stream is one portion."""
        portion: list[str] = []
        characters, complete = 0, 0
        while True:
            for document in itertools.islice(documents(self._source), self._held, None):
                portion.append(document)
                characters += len(document)
                if characters >= PORTION_CHARACTERS:
                    yield portion
                    portion, characters, complete = [], 0, complete + 1
            if not complete:
                yield portion
                portion, characters = [], 0

    def _encode(self, texts: list[str]) -> Tensor:
        """The ids of documents, each with an end behind it."""
        mark = self.tokenizer.token_to_id(END_OF_TEXT)
        end = self.tokenizer.encode("\n").ids if mark is None else [mark]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return torch.tensor([i for one in encoded for i in (*one.ids, *end)], dtype=torch.int64)


def _tokenizer(config: DataConfig, texts: list[str]) -> Tokenizer:
    if config.tokenizer_file:
        path = Path(config.tokenizer_file)
        if not path.is_file():
            raise DataError(f"data.tokenizer_file: there is no {path}")
        return plain(Tokenizer.from_file(str(path)))
    marks = (END_OF_TEXT,) if config.tokenizer == "bpe" else ()
    return train_tokenizer(texts, config.tokenizer, config.vocabulary, config.lowercase, marks)


def documents(source: str) -> Iterator[str]:
    """The texts of a folder of .jsonl files (column "text") and .txt files (one each), or of a
    data set of the Hub, from the first on."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            "reading a stream needs the package datasets: pip install -e '.[stream]'"
        ) from None
    path = Path(source)
    found = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    lines = [str(file) for file in found if file.suffix == ".jsonl"]
    texts = [str(file) for file in found if file.suffix == ".txt"]
    if path.exists() and not lines and not texts:
        raise DataError(f"{path}: no .jsonl or .txt files there")
    try:
        if not path.exists():
            yield from _texts(datasets.load_dataset(source, split="train", streaming=True))
        if lines:
            yield from _texts(
                datasets.load_dataset("json", data_files=lines, split="train", streaming=True)
            )
        if texts:
            whole = {"sample_by": "document", "split": "train", "streaming": True}
            yield from _texts(datasets.load_dataset("text", data_files=texts, **whole))
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the stream {source} cannot be read ({error}). Without a network, pass --data FOLDER "
            'of .jsonl files (one {"text": ...} a line) or .txt files, or use data.kind "text" for '
            "a corpus that fits into memory"
        ) from None


def _texts(rows: object) -> Iterator[str]:
    for row in rows:  # type: ignore[attr-defined]  # an iterable dataset, as streaming asks
        if not isinstance(row.get("text"), str):
            has = ", ".join(column for column, value in row.items() if value is not None)
            raise DataError(f'a document has no text in a column "text"; it has {has}')
        yield row["text"]
