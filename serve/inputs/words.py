"""Plain English text encoded word by word, with the tokens of each word remembered.

The library cuts every text anew, letter by letter, which takes longer than all else that is done
for a short request; most words have come before. Knows how byte-level BPE cuts ASCII text;
deliberately nothing else: of all other text and tokenizers it says that they are not its own.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

Rewrite = Callable[[str], str]

# The expression of byte-level BPE, for ASCII, with what is frequent first, which changes no match;
# white space is spelt out, as that of Python has more.
_WORDS = re.compile(
    r" ?[A-Za-z]+| ?[0-9]+|'s|'t|'re|'ve|'m|'ll|'d| ?[^\t-\r A-Za-z0-9]+"
    r"|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
# Characters that cannot be printed stand in the vocabulary as letters from here on, in their order.
_FIRST_LETTER = 256
_LETTERS = {code: _FIRST_LETTER + place for place, code in enumerate([*range(33), 127])}
# Eight MB of a tokenizer that has seen so many: 7,600 news stories have 26,000 words.
_MOST_WORDS, _MOST_CHARACTERS = 32_768, 32


class Words:
    """The tokens of plain texts."""

    def __init__(self, tokenizer: Tokenizer, rewrites: tuple[Rewrite, ...], spaced: bool) -> None:
        self._known = _Known(tokenizer)
        self._rewrites = rewrites
        self._spaced = spaced

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Words | None":
        """For this tokenizer; None unless it cuts and rewrites text in ways that are known here."""
        parts = json.loads(tokenizer.to_str())
        cut, model = parts["pre_tokenizer"] or {}, parts["model"]
        rewrites = _rewrites(parts["normalizer"])
        plain = (
            (cut.get("type"), cut.get("use_regex")) == ("ByteLevel", True)
            and model["type"] == "BPE"
            and model["dropout"] is None
            and (parts["post_processor"] or cut)["type"] == "ByteLevel"
            and not parts["truncation"]
            and not parts["padding"]
            and all(token["special"] for token in parts["added_tokens"])
            and tokenizer.encode_special_tokens
        )
        if rewrites is None or not plain:
            return None
        return cls(tokenizer, rewrites, cut["add_prefix_space"])

    def encode(self, text: str) -> list[int] | None:
        """All tokens; None if the text is not plain."""
        if not text.isascii():
            return None
        for rewrite in self._rewrites:
            text = rewrite(text)
        if not text:
            return None
        if self._spaced and text[0] != " ":
            text = " " + text
        return [*chain.from_iterable(map(self._known.__getitem__, _WORDS.findall(text)))]


class _Known(dict[str, tuple[int, ...]]):
    """Tokens of words, found when they are first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._model = tokenizer.model

    def __missing__(self, word: str) -> tuple[int, ...]:
        found = tuple(token.id for token in self._model.tokenize(word.translate(_LETTERS)))
        if len(self) >= _MOST_WORDS:
            self.clear()
        if len(word) <= _MOST_CHARACTERS:
            self[word] = found
        return found


def _rewrites(normalizer: Mapping[str, Any] | None) -> tuple[Rewrite, ...] | None:
    """What a normalizer does to ASCII text; None if that is not known here."""
    if normalizer is None:
        return ()
    if normalizer["type"] == "Lowercase":
        return (str.lower,)
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return (partial(_replaced, old, new),) if old and new.isascii() else None
    if normalizer["type"] == "Sequence":
        return _joined(_rewrites(part) for part in normalizer["normalizers"])
    return None


def _joined(parts: Iterable[tuple[Rewrite, ...] | None]) -> tuple[Rewrite, ...] | None:
    joined: tuple[Rewrite, ...] = ()
    for part in parts:
        if part is None:
            return None
        joined += part
    return joined


def _replaced(old: str, new: str, text: str) -> str:
    return text.replace(old, new)
