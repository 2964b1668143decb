"""The tokenizers library: whether a tokenizer is the one promised, and text of any length encoded
at a cost that the model's window bounds.

Knows what makes the library slow; deliberately neither requests nor what a model does.
"""

from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel

from serve.bundle import BundleError, TokenizerSpec

_MODELS = {"chars": WordLevel, "bpe": BPE}
# Tokens between a cut through the text and the nearest token that is kept: what a cut changes
# ends with the word that it cuts.
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 16


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """All tokens; unlike `Tokenizer.encode`, other threads run meanwhile."""
    tokens: list[int] = tokenizer.encode_batch_fast([text])[0].ids
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
    pad = tokenizer.id_to_token(promised.pad_id) or ""
    # Padding must be nothing that text turns into.
    if promised.kind == "chars":
        special = len(pad) > 1
    else:
        added = tokenizer.get_added_tokens_decoder().get(promised.pad_id)
        special = added is not None and added.special
    if not special:
        raise BundleError(
            f"has the token {pad!r} at the manifest's pad_id ({promised.pad_id}), which is no "
            f"padding; {again}"
        )
