"""The tokenizers library: whether a tokenizer is the one promised, and text of any length encoded
at a cost that the model's window bounds.

Knows what makes the library slow; deliberately neither requests nor what a model does.
"""

import os

from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel

from serve.bundle import BundleError, TokenizerSpec

# One text at a time needs no threads. Those of the library are made at the first long text, and if
# the system gives none then, no long text is ever read again.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_MODELS = {"chars": WordLevel, "bpe": BPE, "words": WordLevel}
# Tokens between a cut through the text and the nearest token that is kept: what a cut changes
# ends with the word that it cuts.
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 16
# Up to so many, letting another thread run takes longer than encoding.
_SHORT_CHARACTERS = 400


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """All tokens; while a text that is not short is encoded, other threads run."""
    tokens: list[int]
    if len(text) <= _SHORT_CHARACTERS:
        tokens = tokenizer.encode(text).ids
    else:
        tokens = tokenizer.encode_batch_fast([text])[0].ids
    return tokens


def encode_ends(
    tokenizer: Tokenizer, text: str, head: int, tail: int
) -> tuple[list[int], list[int]] | None:
    """The first `head` and last `tail` tokens of a text that is far longer; None if it is not.

    Only the ends are encoded. They are what encoding everything gives, unless one word is so long
    that it reaches from a cut to a token that is kept.
    """
    reach = _CHARACTERS_PER_TOKEN * (max(head, tail) + _MARGIN_TOKENS)
    while len(text) > 2 * reach:
        first = encode(tokenizer, text[:reach])
        last = encode(tokenizer, text[-reach:]) if tail else []
        if len(first) >= head + _MARGIN_TOKENS and (not tail or len(last) >= tail + _MARGIN_TOKENS):
            return first[:head], last[len(last) - tail :]
        reach *= 4
    return None


def check_tokenizer(tokenizer: Tokenizer, promised: TokenizerSpec) -> None:
    """BundleError unless the tokenizer is the one that the manifest describes."""
    again = "export the bundle again"
    if not isinstance(tokenizer.model, _MODELS[promised.kind]):
        kind = type(tokenizer.model).__name__
        raise BundleError(f"is a {kind} tokenizer, but the manifest says {promised.kind}; {again}")
    vocab = tokenizer.get_vocab()
    if len(vocab) != promised.vocab_size or max(vocab.values()) >= promised.vocab_size:
        raise BundleError(
            f"has {len(vocab)} tokens, but the manifest says {promised.vocab_size}; {again}"
        )
    names = {promised.pad_id: "pad_id", promised.bos_id: "bos_id", promised.eos_id: "eos_id"}
    for token in promised.special_ids:
        _check_special(tokenizer, promised.kind, token, names[token])


def _check_special(tokenizer: Tokenizer, kind: str, token: int, name: str) -> None:
    """BundleError if this is a token that text turns into."""
    text = tokenizer.id_to_token(token) or ""
    if kind == "chars":
        special = len(text) > 1
    elif kind == "words":
        special = text.startswith("<") and text.endswith(">")
    else:
        added = tokenizer.get_added_tokens_decoder().get(token)
        special = added is not None and added.special
    if not special:
        what = "padding" if name == "pad_id" else "special token"
        raise BundleError(
            f"has the token {text!r} at the manifest's {name} ({token}), which is no {what}; "
            "export the bundle again"
        )
