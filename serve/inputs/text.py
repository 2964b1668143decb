"""Text and tokens: encoding inputs, decoding an answer as it grows, stop strings."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece

from serve.bundle import Bundle, BundleError, Manifest, TokenizerSpec
from serve.bundle.part import inside_file
from serve.errors import Unprocessable, is_panic

# Encoding of plain ASCII text word by word, with a cache of words. The library encodes every text
# anew, which takes longer than everything else in a short request, and most words have occurred
# before.


Rewrite = Callable[[str], str]

# The regular expression of byte-level BPE, for ASCII. Frequent cases come first, which changes no
# match; white space is spelt out, since Python's includes more.
_WORDS = re.compile(
    r" ?[A-Za-z]+| ?[0-9]+|'s|'t|'re|'ve|'m|'ll|'d| ?[^\t-\r A-Za-z0-9]+"
    r"|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
# Unprintable characters are written in the vocabulary as letters from here on, in order.
_FIRST_LETTER = 256
_LETTERS = {code: _FIRST_LETTER + place for place, code in enumerate([*range(33), 127])}
# 8 MB for a tokenizer that has seen this many words; 7,600 news stories have 26,000.
_MOST_WORDS, _MOST_CHARACTERS = 32_768, 32


class WordCache:
    """Tokens of plain texts, with a cache of words."""

    def __init__(self, tokenizer: Tokenizer, rewrites: tuple[Rewrite, ...], spaced: bool) -> None:
        self._known = _CachedWords(tokenizer)
        self._rewrites = rewrites
        self._spaced = spaced

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WordCache | None":
        """The cache for this tokenizer; None if it splits or normalises text in a way not known
        here.
        """
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
        """All tokens; None if the text is not plain ASCII."""
        if not text.isascii():
            return None
        for rewrite in self._rewrites:
            text = rewrite(text)
        if not text:
            return None
        if self._spaced and text[0] != " ":
            text = " " + text
        return [*chain.from_iterable(map(self._known.__getitem__, _WORDS.findall(text)))]


class _CachedWords(dict[str, tuple[int, ...]]):
    """Tokens of words, encoded on first use."""

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
    """What a normalizer does to ASCII text; None if it is not known here."""
    if normalizer is None:
        return ()
    if normalizer["type"] == "Lowercase":
        return (str.lower,)
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return (lambda text: text.replace(old, new),) if old and new.isascii() else None
    if normalizer["type"] == "Sequence":
        parts = [_rewrites(part) for part in normalizer["normalizers"]]
        known = [part for part in parts if part is not None]
        return tuple(chain.from_iterable(known)) if len(known) == len(parts) else None
    return None


# Encoding of texts of any length, at a cost that the model's window bounds.


# One text at a time needs no threads. The library's threads are created at the first long text, and
# if the system refuses them then, no long text can be encoded again.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tokens between a cut in the text and the nearest token that is kept. The effect of a cut ends with
# the word that it cuts.
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 16
# For shorter texts, letting another thread run takes longer than encoding.
_SHORT_CHARACTERS = 400


class Token(NamedTuple):
    """A token, and the characters of the text that it covers."""

    number: int
    start: int
    end: int


TokenT = TypeVar("TokenT")


class Encoder:
    """A tokenizer, as requests use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = WordCache.of(tokenizer)

    def encode(self, text: str) -> list[int]:
        """All tokens. While a long text is encoded, other threads run."""
        tokens = self._words.encode(text) if self._words else None
        if tokens is not None:
            return tokens
        if len(text) <= _SHORT_CHARACTERS:
            tokens = self._tokenizer.encode(text).ids
        else:
            tokens = self._tokenizer.encode_batch_fast([text])[0].ids
        return tokens

    def spans(self, text: str, head: int, tail: int) -> list[Token]:
        """The first `head` and last `tail` tokens of a text, or all of them if it is short enough.

        Of a much longer text only the ends are encoded, as in `ends`.
        """
        ends = self._ends(text, head, tail, partial(self._tokens, text))
        if ends is not None:
            return ends[0] + ends[1]
        tokens = self._tokens(text, 0, len(text))
        if len(tokens) <= head + tail:
            return tokens
        return tokens[:head] + tokens[len(tokens) - tail :]

    def _tokens(self, text: str, low: int, high: int) -> list[Token]:
        """The tokens of a part of a text; a space before a word does not belong to the word."""
        encoded = self._tokenizer.encode(text[low:high])
        tokens = []
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            piece = text[low + start : low + end]
            spaces = len(piece) - len(piece.lstrip()) if piece.strip() else 0
            tokens.append(Token(token, low + start + spaces, low + end))
        return tokens

    def ends(self, text: str, head: int, tail: int) -> tuple[list[int], list[int]] | None:
        """The first `head` and last `tail` tokens of a much longer text; None for a shorter text.

        Only the ends are encoded. The result is the same as from the whole text, unless a single
        word reaches from a cut to a token that is kept.
        """
        return self._ends(text, head, tail, lambda low, high: self.encode(text[low:high]))

    def _ends(
        self, text: str, head: int, tail: int, encode: Callable[[int, int], list[TokenT]]
    ) -> tuple[list[TokenT], list[TokenT]] | None:
        reach = _CHARACTERS_PER_TOKEN * (max(head, tail) + _MARGIN_TOKENS)
        while len(text) > 2 * reach:
            first = encode(0, reach)
            last = encode(len(text) - reach, len(text)) if tail else []
            enough = len(first) >= head + _MARGIN_TOKENS
            if enough and (not tail or len(last) >= tail + _MARGIN_TOKENS):
                return first[:head], last[len(last) - tail :]
            reach *= 4
        return None


# Checks that a tokenizer matches the manifest.


_MODELS = {
    "chars": WordLevel,
    "bpe": BPE,
    "words": WordLevel,
    "wordpiece": WordPiece,
    "unigram": Unigram,
}


def check_tokenizer(tokenizer: Tokenizer, spec: TokenizerSpec) -> None:
    """BundleError unless the tokenizer matches the manifest."""
    again = "export the bundle again"
    if not isinstance(tokenizer.model, _MODELS[spec.kind]):
        kind = type(tokenizer.model).__name__
        raise BundleError(f"is a {kind} tokenizer, but the manifest says {spec.kind}; {again}")
    vocab = tokenizer.get_vocab()
    if len(vocab) != spec.vocab_size or max(vocab.values()) >= spec.vocab_size:
        raise BundleError(
            f"has {len(vocab)} tokens, but the manifest says {spec.vocab_size}; {again}"
        )
    names = {spec.pad_id: "pad_id", spec.bos_id: "bos_id", spec.eos_id: "eos_id"}
    for token in spec.special_ids:
        _check_special(tokenizer, spec.kind, token, names[token])


def _check_special(tokenizer: Tokenizer, kind: str, token: int, name: str) -> None:
    """BundleError if text can produce this special token."""
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


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FEW_CHARACTERS = 32  # of a vocabulary that a message can name
_PRIVATE = range(0xE000, 0x110000)  # first characters without a meaning; more than a body can hold
_CONTEXT_TOKENS = 8  # of a prompt, that the text of an answer may depend on
_SHORT_TOKENS, _KEPT_TEXTS = 2, 1 << 16  # a token, together with the one before it


Span = tuple[int, int]  # characters of a text: the first, and the one after the last


class Encoded(NamedTuple):
    """The tokens of one input, and whether it was cut to fit."""

    tokens: list[int]
    truncated: bool = False
    counted: int | None = None  # tokens of the whole text, if counted
    spans: tuple[Span, ...] = ()  # per token, if asked for: the part of the text that it labels


class TooLong(Unprocessable):
    """A text has more tokens than the model reads."""


class TextCodec:
    """The tokenizer of a bundle, with the limits of its model."""

    def __init__(self, bundle: Bundle) -> None:
        self._manifest: Manifest = bundle.manifest
        self._input = bundle.manifest.text_input
        self.max_tokens = self._input.max_tokens  # of one text
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path))
        except BaseException as error:  # plain Exception for everything, or a panic
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise BundleError(
                f"is no tokenizer that can be read ({error}); export the bundle again",
                file=str(bundle.tokenizer_path),
            ) from error
        # If a text contains "<pad>", it means these five characters, not padding.
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._marks = {token.content: number for number, token in added.items() if token.special}
        self._short: dict[tuple[int, ...], str] = {}  # texts that streams need again and again
        with inside_file(bundle.tokenizer_path):
            check_tokenizer(self._tokenizer, bundle.manifest.text_tokenizer)
        self._spec = bundle.manifest.text_tokenizer
        self.bos_id = self._spec.bos_id  # starts every answer of a translator
        self.eos_id = self._spec.eos_id  # ends an answer, if there is one
        special = {self._tokenizer.id_to_token(token) for token in self._spec.special_ids}
        # Padding and beginning of sequence, which no answer contains.
        self.banned_tokens = tuple(
            token for token in self._spec.special_ids if token != self._spec.eos_id
        )
        self._encoder = Encoder(self._tokenizer)
        self._characters: dict[str, int] | None = None
        if self._spec.kind == "chars":
            vocab = self._tokenizer.get_vocab()
            self._characters = {text: token for text, token in vocab.items() if text not in special}

    def encode_prompt(self, text: str, param: str = "prompt") -> list[int]:
        """The tokens of a prompt, or of a text to translate; they must fit the model's window."""
        encoded = self._encode(text, param, self.max_tokens, 0)
        if encoded.truncated:
            raise self._too_long(encoded.counted, param, self._shorter)
        return encoded.tokens

    @property
    def end_mark(self) -> str:
        """The text of the token that ends an answer; empty if there is none."""
        return "" if self.eos_id is None else self._tokenizer.id_to_token(self.eos_id) or ""

    def breaks(self, texts: Sequence[str]) -> str:
        """A character that no text has, to break special tokens; empty if there are none.

        So what people say in a chat is told from what its template writes.
        """
        if not self._marks:
            return ""
        first = chr(_PRIVATE[0])
        if not any(first in text for text in texts):
            return first
        used = {*chain.from_iterable(texts)}
        return next(one for one in map(chr, _PRIVATE) if one not in used)

    def broken(self, text: str, character: str) -> str:
        """The text with this character in each special token, and in what may begin or end one.

        Templates may write two texts side by side, and cut spaces.
        """
        for mark in self._marks:
            text = text.replace(mark, mark[:1] + character + mark[1:])
        said = text.strip()
        if not said:
            return text
        first = text.index(said) + 1
        last = max(first, first + len(said) - 2)
        return text[:first] + character + text[first:last] + character + text[last:]

    def encode_chat(self, text: str, broken: str, character: str, param: str) -> list[int]:
        """The tokens of a chat as its template wrote it, with the special tokens that it has.

        `broken` is the same chat, written of texts that are `broken` with this character.
        """
        if not any(mark in broken for mark in self._marks):
            return self.encode_prompt(text, param)
        limit = self.max_tokens
        if self._encoder.ends(text, limit, 0) is not None:  # so long that nothing else matters
            raise self._too_long(None, param, self._shorter)
        begin = self.begin
        tokens = self._marked(text, broken, character)
        if tokens[: len(begin)] != begin:
            tokens = begin + tokens
        if len(tokens) > limit:
            raise self._too_long(len(tokens), param, self._shorter)
        return tokens

    @cached_property
    def begin(self) -> list[int]:
        """The special tokens that the tokenizer puts before every text."""
        start = self._tokenizer.encode("a")
        return list(start.ids[: [*start.special_tokens_mask, 0].index(0)])

    @cached_property
    def _with_marks(self) -> Tokenizer:
        """The tokenizer that reads special tokens in a text."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = False
        return tokenizer

    def _marked(self, text: str, broken: str, character: str) -> list[int]:
        """The tokens of a text, with those special tokens that are whole in the broken one."""
        longest_first = sorted(self._marks, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", broken)
        special = {*self._marks.values()}
        tokens: list[int] = self._with_marks.encode(text, add_special_tokens=False).ids
        wanted = [self._marks[part] for part in parts if part in self._marks]
        if [token for token in tokens if token in special] == wanted:
            return list(tokens)
        # Somebody wrote what reads as a special token, perhaps in other letters.
        tokens = []
        for part in filter(None, parts):
            if part in self._marks:
                tokens.append(self._marks[part])
            else:
                said = part.replace(character, "")
                tokens += self._tokenizer.encode(said, add_special_tokens=False).ids
        return tokens

    def check_prompt(self, tokens: Sequence[int], param: str) -> list[int]:
        """The tokens of a prompt that was sent as tokens, checked."""
        if len(tokens) > self.max_tokens:
            raise self._too_long(len(tokens), param, self._shorter)
        for index, token in enumerate(tokens):
            if not 0 <= token < self._spec.vocab_size or token == self._spec.pad_id:
                raise Unprocessable(
                    f"{param}[{index}] is no token of {self._manifest.name}: send ids from 0 to "
                    f"{self._spec.vocab_size - 1}, without {self._spec.pad_id}, which is padding",
                    param=f"{param}[{index}]",
                )
        return list(tokens)

    def encode_input(self, text: str, truncate: bool, param: str = "input") -> Encoded:
        """The tokens of a text to classify, cut as in training if it is too long."""
        head, tail = self._kept
        encoded = self._encode(text, param, head, tail)
        if self._input.exact and (encoded.truncated or len(encoded.tokens) != head):
            raise self._not_exact(encoded, param)
        if encoded.truncated and not truncate:
            raise self._too_long(
                encoded.counted,
                param,
                f"shorten it, or allow truncate to keep its first {head}"
                + (f" and last {tail} tokens" if tail else " tokens"),
            )
        return encoded

    def encode_positions(self, text: str, truncate: bool, param: str = "input") -> Encoded:
        """The same tokens, with what each labels: its character, or the word that it starts.

        Words are separated by spaces. Other tokens of a word label nothing.
        """
        encoded = self.encode_input(text, truncate, param)
        head, tail = self._kept
        if self._characters is None:
            found = self._encoder.spans(text, head, tail)
            tokens = [token.number for token in found]
            return encoded._replace(tokens=tokens, spans=_words(text, found))
        places = [*range(len(text))]
        if encoded.truncated:
            places = places[:head] + places[len(text) - tail :]
        return encoded._replace(spans=tuple((place, place + 1) for place in places))

    def decode(self, tokens: list[int]) -> str:
        """The text of these tokens."""
        if len(tokens) > _SHORT_TOKENS:
            return self._decode(tokens)
        key = tuple(tokens)
        text = self._short.get(key)
        if text is None:
            if len(self._short) >= _KEPT_TEXTS:
                self._short.clear()
            text = self._short[key] = self._decode(tokens)
        return text

    def decode_behind(self, known: list[int], token: int) -> str:
        """The text of a token behind others, with the space that it may begin with; U+FFFD if it is
        part of a character.
        """
        text = self.decode([token])
        if _REPLACEMENT in text:
            return text
        return self.decode([*known, token])[len(self.decode(known)) :]

    def _encode(self, text: str, param: str, head: int, tail: int) -> Encoded:
        if not text:
            raise Unprocessable(f"{param} is empty: send some text", param=param)
        if self._characters is not None:
            return self._encode_characters(text, self._characters, param, head, tail)
        ends = self._encoder.ends(text, head, tail)
        if ends is not None:
            return Encoded(ends[0] + ends[1], truncated=True)
        tokens = self._encoder.encode(text)
        if not tokens:
            raise Unprocessable(f"{param} holds no text that the model can read", param=param)
        if len(tokens) <= head + tail:
            return Encoded(tokens)
        kept = tokens[:head] + tokens[len(tokens) - tail :]
        return Encoded(kept, truncated=True, counted=len(tokens))

    def _encode_characters(
        self, text: str, known: Mapping[str, int], param: str, head: int, tail: int
    ) -> Encoded:
        """Encodes texts whose tokens are characters; a long text can be cut before encoding."""
        self.check_characters(text, param)
        if len(text) <= head + tail:
            return Encoded([known[character] for character in text])
        kept = text[:head] + text[len(text) - tail :]
        return Encoded([known[character] for character in kept], truncated=True, counted=len(text))

    @property
    def _kept(self) -> tuple[int, int]:
        """How many of the first and last tokens are kept of a text that is too long."""
        spec = self._input
        if spec.truncation is None:
            return spec.max_tokens, 0
        return spec.truncation.head, spec.truncation.tail

    @property
    def _shorter(self) -> str:
        if self._manifest.task == "translate":
            return "translate it in parts, for example by sentences"
        return "shorten it, for example to its end"

    def _too_long(self, tokens: int | None, param: str, advice: str) -> TooLong:
        """Of a much longer text only the ends are encoded, so its tokens are not counted."""
        limit = sum(self._kept)
        known = {} if tokens is None else {"tokens": tokens}
        found = f"more than {limit}" if tokens is None else str(tokens)
        return TooLong(
            f"{param} has {found} tokens, but {self._manifest.name} reads at most {limit}: "
            f"{advice}",
            param=param,
            max_tokens=limit,
            **known,
        )

    def _not_exact(self, encoded: Encoded, param: str) -> Unprocessable:
        wanted = self._manifest.text_input.max_tokens
        unit = "tokens" if self._characters is None else "characters"
        tokens = encoded.counted if encoded.truncated else len(encoded.tokens)
        known = {} if tokens is None else {"tokens": tokens}
        found = f"more than {wanted}" if tokens is None else str(tokens)
        return Unprocessable(
            f"{param} has {found} {unit[:-1] if tokens == 1 else unit}, but {self._manifest.name} "
            f"reads exactly {wanted}: send a text of {wanted} {unit}",
            param=param,
            max_tokens=wanted,
            **known,
        )

    def check_characters(self, text: str, param: str) -> None:
        """Unprocessable, naming the first, if a character is outside a vocabulary of characters."""
        known = self._characters
        if known is None or known.keys() >= set(text):
            return
        index, character = next(
            (index, character) for index, character in enumerate(text) if character not in known
        )
        few = f"; it reads {''.join(sorted(known))!r}" if len(known) <= _FEW_CHARACTERS else ""
        raise Unprocessable(
            f"{param} has the character {character!r} (U+{ord(character):04X}) at index {index}, "
            f"which is outside the vocabulary of {self._manifest.name}: remove or replace it{few}",
            param=param,
            index=index,
            character=character,
        )

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _words(text: str, tokens: Sequence[Token]) -> tuple[Span, ...]:
    """The word that each token starts, if it starts one."""
    spans: list[Span] = []
    last = -1  # the token that started the latest word
    for token in tokens:
        start, end = token.start, token.end
        spans.append((start, start))
        if not text[start:end].strip():
            continue
        goes_on = last >= 0 and start <= spans[last][1] and not text[start - 1 : start].isspace()
        if goes_on or (last >= 0 and start < spans[last][1]):
            spans[last] = (spans[last][0], max(end, spans[last][1]))
        elif start == 0 or text[start - 1].isspace():  # otherwise the start of the word was cut off
            last = len(spans) - 1
            spans[last] = (start, end)
    return tuple(spans)


class TextStream:
    """The text of an answer while its tokens arrive.

    Bytes of an incomplete character are held back, so that the pieces always join to the whole
    text. `flush` returns what was held back. The answer goes on from the tokens `before`: its first
    word may be written with a space or without.
    """

    def __init__(self, codec: TextCodec, before: Sequence[int] = ()) -> None:
        self._codec = codec
        self._tokens = [*before[-_CONTEXT_TOKENS:]]
        if codec.decode(self._tokens).endswith(_REPLACEMENT):  # its rest is of the answer
            self._tokens = []
        self._context = 0  # first token of the window that is decoded again
        self._written = len(self._tokens)  # tokens whose text was returned

    @property
    def context(self) -> list[int]:
        """The last tokens whose text was returned, on which that of the next one can depend."""
        return self._tokens[self._context : self._written]

    def push(self, token: int) -> str:
        """The text that this token completes: usually its own, sometimes none."""
        self._tokens.append(token)
        text = self._pending()
        if text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of all tokens of an answer, at once."""
        known = self._codec.decode(self._tokens)
        text = self._codec.decode([*self._tokens, *tokens])[len(known) :]
        if _REPLACEMENT not in text:
            return text
        # Some decoders take back what they wrote if the bytes behind it make no character.
        return "".join(map(self.push, tokens)) + self.flush()

    def flush(self) -> str:
        """What is left, complete or not."""
        return self._advance(self._pending()) if self._written < len(self._tokens) else ""

    def _pending(self) -> str:
        known = self._codec.decode(self.context)
        return self._codec.decode(self._tokens[self._context :])[len(known) :]

    def _advance(self, text: str) -> str:
        # The last tokens with a text stay as context: that of a token can depend on the one before.
        if text:
            self._context = self._written
        self._written = len(self._tokens)
        return text


# Stop strings end an answer before the first of them; no part of one is ever returned.


class StopFilter:
    """Takes text in pieces, and returns what cannot belong to a stop string any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can be returned, and whether a stop string ended the answer."""
        if not self._stops:
            return text, False
        self._held += text
        # The match that is complete first, as if the text came character by character.
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            _, start = min(matches)
            before, self._held = self._held[:start], ""
            return before, True
        keep = self._partial_match()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return out, False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        out, self._held = self._held, ""
        return out

    def _partial_match(self) -> int:
        """The length of the longest suffix of the held text that starts a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next(
            (
                length
                for length in range(longest, 0, -1)
                if any(stop.startswith(self._held[-length:]) for stop in self._stops)
            ),
            0,
        )
