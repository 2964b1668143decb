"""Text to continue: corpora, streams of documents, and the tokenizers that are trained on them."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stepdial import install_command
from train.data.batch import Batch, Sizes, as_tensor
from train.data.tables import DataError, digest_of, read_text
from train.recipe import DataConfig

# Plain text to train, validate and test on: one text that is divided, or a file of each.


class Corpus(NamedTuple):
    train: str
    validation: str
    test: str


def divided(text: str, held_out: float) -> Corpus:
    """The last share of a text is held out, to validate and to test on."""
    cutoff = int(len(text) * (1 - held_out))
    return Corpus(text[:cutoff], text[cutoff:], text[cutoff:])


def read_corpus(data: DataConfig) -> Corpus:
    """The files that the recipe names in the folder data.path, or all text there is."""
    path = Path(data.path)
    if not data.path or not path.exists():
        what = f"FOLDER, where {data.train} is" if data.train else "FILE.txt, any plain text"
        missing = f"{data.path} does not exist" if data.path else "this recipe needs a text"
        raise DataError(f"{missing}: pass --data {what}, of 10 kB or more")
    others = data.validation or data.test
    if others and not data.train and path.is_dir():
        raise DataError(f"{others} is held out, so name the text to train on too: data.train")
    if data.train or others:
        text = _text(path / data.train if data.train else path)
        beside = path if data.train else path.parent
        held = _text(beside / data.validation) if data.validation else ""
        corpus = Corpus(text, held, held) if held else divided(text, data.held_out)
        return corpus._replace(test=_text(beside / data.test)) if data.test else corpus
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.txt"), *path.glob("*.txt.gz")])
    if not files:
        raise DataError(f"{path}: no .txt files there")
    return divided("\n".join(map(_text, files)), data.held_out)


def _text(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} does not exist: set data.train, validation and test")
    return read_text(path)


# Tokenizers of the `tokenizers` library: characters, words or byte-level BPE. Id 0 is padding. A
# tokenizer travels to the server as its own tokenizer.json.


Kind = Literal["chars", "bpe", "words", "wordpiece", "unigram"]
Ids = npt.NDArray[np.int32]
LongIds = npt.NDArray[np.int64]
AT_ONCE = 4_000_000  # characters
PAD, UNKNOWN, LINE_END = "<pad>", "<unk>", "<eos>"
BEGIN, END = "<s>", "</s>"  # around the target of a translation


def train_tokenizer(
    texts: Iterable[str],
    kind: Kind,
    vocabulary: int = 8192,
    lowercase: bool = False,
    marks: tuple[str, ...] = (),
) -> Tokenizer:
    """Learn a vocabulary from texts; `marks` are tokens of byte-level BPE that no text contains."""
    if kind in ("wordpiece", "unigram"):
        raise ValueError(
            f'data.tokenizer "{kind}" is of pretrained models and not learnt: start with '
            "`stepdial convert`"
        )
    if kind == "chars":
        return plain(_characters(texts))
    if kind == "words":
        return plain(_words(texts, vocabulary))
    return plain(_byte_pairs(texts, vocabulary, lowercase, marks))


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """One to which marks in a text are characters, as they are to the server."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def _characters(texts: Iterable[str]) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    vocab = {PAD: 0} | {character: i + 1 for i, character in enumerate(sorted(seen))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _words(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Whatever stands between spaces, ends of lines included; rare words share one id."""
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(text.replace("\n", f" {LINE_END} ").split())
    for mark in (PAD, UNKNOWN):  # tokens already
        seen.pop(mark, None)
    words = [word for word, _ in seen.most_common(vocabulary - 2)]
    vocab = {word: i for i, word in enumerate([PAD, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", f" {LINE_END} "), normalizers.Replace(PAD, UNKNOWN)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spaced = decoders.WordPiece(prefix="##", cleanup=False)  # a space before all but the first
    # Each word by itself, so that the text of an answer only grows.
    ends = [decoders.Replace(end, "\n") for end in (f" {LINE_END}", LINE_END)]
    tokenizer.decoder = decoders.Sequence(
        [spaced, *ends, decoders.Fuse(), decoders.Replace("\n ", "\n")]
    )
    return tokenizer


def _byte_pairs(
    texts: Iterable[str], vocabulary: int, lowercase: bool, marks: tuple[str, ...]
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        # Markup of web reviews is spacing, not words.
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Replace("<br />", " "), normalizers.Lowercase()]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=lowercase)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[PAD, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ids_of(tokenizer: Tokenizer, texts: Iterable[str], special: bool = True) -> Iterator[Ids]:
    """Text after text; what a tokenizer notes about its tokens takes a hundred times their room.

    Special: with the tokens that the tokenizer puts around each text.
    """
    portion: list[str] = []
    waiting = 0
    for text in texts:
        portion.append(text)
        waiting += len(text)
        if waiting >= AT_ONCE:
            yield from _ids_at_once(tokenizer, portion, special)
            portion, waiting = [], 0
    yield from _ids_at_once(tokenizer, portion, special)


def _ids_at_once(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[Ids]:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=special)
    return [np.array(each.ids, np.int32) for each in encoded]


def begin_of(tokenizer: Tokenizer) -> LongIds:
    """The special tokens before each text, as a model of the Hub may have them."""
    encoded = tokenizer.encode("a")
    return np.array(encoded.ids[: [*encoded.special_tokens_mask, 0].index(0)], np.int64)


def cut(ids: Ids, window: int, head: int, tail: int) -> Ids:
    """The first `head` and last `tail` ids of a long text; the first `window` if both are 0."""
    head, tail = (head, tail) if head + tail else (window, 0)
    if len(ids) <= head + tail:
        return ids
    return np.concatenate([ids[:head], ids[len(ids) - tail :]])


# A corpus of text as windows of ids, drawn at random in training.


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
        self.window, self._begin = window, begin_of(self.tokenizer)
        self.train_ids = self._encode(corpus.train)
        self.validation_ids = self._encode(corpus.validation)
        same = corpus.test == corpus.validation
        self.held_ids = self.validation_ids if same else self._encode(corpus.test)
        self.digest = digest_of(self.train_ids, self.validation_ids)
        parts = (self.train_ids, self.validation_ids, self.held_ids)
        # Else characters are read as padding; other tokenizers know every text.
        self.knows_all = config.tokenizer != "chars" or all(bool(part.all()) for part in parts)
        lengths = [len(part) for part in parts]
        if min(lengths) <= window + 1:
            raise DataError(
                f"the corpus is too short: its parts have {lengths} tokens, but "
                f"each needs more than model.window = {window}. Give more text or a smaller window."
            )

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.tokenizer.get_vocab_size())

    def _encode(self, text: str) -> LongIds:
        ids = ids_of(self.tokenizer, pieces(text), special=False)
        return np.concatenate([NO_IDS, *ids]).astype(np.int64)

    def batch(self, iteration: int, size: int, seed: int) -> Batch:
        return drawn_windows(self.train_ids, self.window, iteration, size, seed, self._begin)

    def held_out(self, size: int) -> Iterator[Batch]:
        return windows_in_order(self.held_ids, self.window, size, self._begin)

    def validation(self, size: int) -> Iterator[Batch]:
        return windows_in_order(self.validation_ids, self.window, size, self._begin)


NO_IDS = np.zeros(0, np.int64)


def drawn_windows(
    ids: LongIds, window: int, iteration: int, size: int, seed: int, begin: LongIds = NO_IDS
) -> Batch:
    """Windows that begin anywhere: a function of (seed, iteration). `begin` stands before each."""
    import torch  # whose draws the windows have always been; only training makes them

    draw = torch.Generator().manual_seed(seed * 1_000_003 + iteration)
    starts = torch.randint(len(ids) - window - 1, (size,), generator=draw)
    return _windows(ids, starts.tolist(), window, begin)


def windows_in_order(
    ids: LongIds, window: int, size: int, begin: LongIds = NO_IDS
) -> Iterator[Batch]:
    """Windows side by side, in batches of `size`, each with `begin` before it.

    No id is predicted twice; without a `begin` nothing predicts the first.
    """
    own = window + 1 - max(1, len(begin))
    windows = (len(ids) - (len(begin) == 0)) // own
    for first in range(0, windows, size):
        starts = [i * own for i in range(first, min(first + size, windows))]
        yield _windows(ids, starts, window, begin)


def _windows(ids: LongIds, starts: list[int], window: int, begin: LongIds) -> Batch:
    end = window + 1 - len(begin)
    rows = as_tensor(np.stack([np.concatenate([begin, ids[s : s + end]]) for s in starts]))
    return Batch((rows[:, :-1],), rows[:, 1:])  # (B, N) both


def pieces(text: str) -> list[str]:
    """A text in pieces that end where a line does: no word is in two of them."""
    found, start = [], 0
    while start < len(text):
        end = text.find("\n", start + 100_000) + 1 or len(text)
        found.append(text[start:end])
        start = end
    return found


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
        self.digest = digest_of(self._ids, self.held_ids)
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

    def _encode(self, texts: list[str]) -> LongIds:
        """The ids of documents, each with an end behind it."""
        mark = self.tokenizer.token_to_id(END_OF_TEXT)
        end = self.tokenizer.encode("\n").ids if mark is None else [mark]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return np.array([i for one in encoded for i in (*one.ids, *end)], np.int64)


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
            f"reading a stream needs the package datasets: {install_command('stream')}"
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
