"""Text of any length encoded, at a cost that the window of the model bounds.

Knows what makes the library slow, and the ways past it; deliberately neither requests nor what a
model does with tokens.
"""

import os

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
