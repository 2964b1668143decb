"""Whether a tokenizer is the one that the manifest of its bundle promises.

Knows the tokenizers library; deliberately no text.
"""

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from serve.bundle import BundleError, TokenizerSpec

_MODELS = {
    "chars": WordLevel,
    "bpe": BPE,
    "words": WordLevel,
    "wordpiece": WordPiece,
    "unigram": Unigram,
}


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
