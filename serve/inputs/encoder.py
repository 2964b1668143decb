"""Text of any length encoded, at a cost that the window of the model bounds.

Knows what makes the library slow, and the ways past it; deliberately neither requests nor what a
model does with tokens.
"""

import os
from typing import NamedTuple

from tokenizers import Tokenizer

from serve.inputs.words import Words

# One text at a time needs no threads. Those of the library are made at the first long text, and if
# the system gives none then, no long text is ever read again.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tokens between a cut through the text and the nearest token that is kept: what a cut changes
# ends with the word that it cuts.
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 16
# Up to so many, letting another thread run takes longer than encoding.
_SHORT_CHARACTERS = 400


class Token(NamedTuple):
    """A token, and the characters of the text that it stands for."""

    number: int
    start: int
    end: int


class Encoder:
    """A tokenizer as it is used on requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = Words.of(tokenizer)

    def encode(self, text: str) -> list[int]:
        """All tokens; while the library encodes a text that is not short, other threads run."""
        tokens = self._words.encode(text) if self._words else None
        if tokens is not None:
            return tokens
        if len(text) <= _SHORT_CHARACTERS:
            tokens = self._tokenizer.encode(text).ids
        else:
            tokens = self._tokenizer.encode_batch_fast([text])[0].ids
        return tokens

    def spans(self, text: str, head: int, tail: int) -> list[Token]:
        """The first `head` and last `tail` tokens of a text, or all if there are no more.

        Of a text that is far longer only the ends are encoded, as `ends` does it.
        """
        reach = _CHARACTERS_PER_TOKEN * (max(head, tail) + _MARGIN_TOKENS)
        while len(text) > 2 * reach:
            first = self._tokens(text, 0, reach)
            last = self._tokens(text, len(text) - reach, len(text)) if tail else []
            enough = len(first) >= head + _MARGIN_TOKENS
            if enough and (not tail or len(last) >= tail + _MARGIN_TOKENS):
                return first[:head] + last[len(last) - tail :]
            reach *= 4
        tokens = self._tokens(text, 0, len(text))
        if len(tokens) <= head + tail:
            return tokens
        return tokens[:head] + tokens[len(tokens) - tail :]

    def _tokens(self, text: str, low: int, high: int) -> list[Token]:
        """The tokens of a part of a text; a space before a word is none of its characters."""
        encoded = self._tokenizer.encode(text[low:high])
        tokens = []
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            piece = text[low + start : low + end]
            spaces = len(piece) - len(piece.lstrip()) if piece.strip() else 0
            tokens.append(Token(token, low + start + spaces, low + end))
        return tokens

    def ends(self, text: str, head: int, tail: int) -> tuple[list[int], list[int]] | None:
        """The first `head` and last `tail` tokens of a text that is far longer; None if it is not.

        Only the ends are encoded. They are what encoding everything gives, unless one word is so
        long that it reaches from a cut to a token that is kept.
        """
        reach = _CHARACTERS_PER_TOKEN * (max(head, tail) + _MARGIN_TOKENS)
        while len(text) > 2 * reach:
            first = self.encode(text[:reach])
            last = self.encode(text[-reach:]) if tail else []
            enough = len(first) >= head + _MARGIN_TOKENS
            if enough and (not tail or len(last) >= tail + _MARGIN_TOKENS):
                return first[:head], last[len(last) - tail :]
            reach *= 4
        return None
