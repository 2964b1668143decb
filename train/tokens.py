"""Tokenizers, all of the `tokenizers` library: characters, or byte-level BPE. Id 0 is padding.

Knows text and ids, not models. A tokenizer travels to the server as its own tokenizer.json.
"""

from collections.abc import Iterable
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Kind = Literal["chars", "bpe"]
PAD = "<pad>"


def train_tokenizer(
    texts: Iterable[str], kind: Kind, vocabulary: int = 8192, lowercase: bool = False
) -> Tokenizer:
    if kind == "chars":
        return _characters(texts)
    return _byte_pairs(texts, vocabulary, lowercase)


def _characters(texts: Iterable[str]) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    vocab = {PAD: 0} | {character: i + 1 for i, character in enumerate(sorted(seen))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_pairs(texts: Iterable[str], vocabulary: int, lowercase: bool) -> Tokenizer:
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
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cut(ids: list[int], window: int, head: int, tail: int) -> list[int]:
    """The first `head` and last `tail` ids of a long text; the first `window` if both are 0."""
    head, tail = (head, tail) if head + tail else (window, 0)
    if len(ids) <= head + tail:
        return ids
    return ids[:head] + ids[len(ids) - tail :]
