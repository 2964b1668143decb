"""Tokenizers of the `tokenizers` library: characters, words or byte-level BPE. Id 0 is padding.

Knows text and ids, not models. A tokenizer travels to the server as its own tokenizer.json.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Kind = Literal["chars", "bpe", "words", "wordpiece", "unigram"]
Ids = npt.NDArray[np.int32]
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
    seen.pop(UNKNOWN, None)
    words = [word for word, _ in seen.most_common(vocabulary - 2)]
    vocab = {word: i for i, word in enumerate([PAD, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", f" {LINE_END} "), normalizers.Replace(PAD, UNKNOWN)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spaced = decoders.WordPiece(prefix="##", cleanup=False)  # a space before all but the first
    tokenizer.decoder = decoders.Sequence(
        [spaced, decoders.Fuse(), decoders.Replace(f" {LINE_END} ", "\n")]
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


def ids_of(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[Ids]:
    """Text after text; what a tokenizer notes about its tokens takes a hundred times their room."""
    portion: list[str] = []
    waiting = 0
    for text in texts:
        portion.append(text)
        waiting += len(text)
        if waiting >= AT_ONCE:
            yield from _ids_at_once(tokenizer, portion)
            portion, waiting = [], 0
    yield from _ids_at_once(tokenizer, portion)


def _ids_at_once(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    return [np.array(each.ids, np.int32) for each in tokenizer.encode_batch(texts)]


def cut(ids: Ids, window: int, head: int, tail: int) -> Ids:
    """The first `head` and last `tail` ids of a long text; the first `window` if both are 0."""
    head, tail = (head, tail) if head + tail else (window, 0)
    if len(ids) <= head + tail:
        return ids
    return np.concatenate([ids[:head], ids[len(ids) - tail :]])
