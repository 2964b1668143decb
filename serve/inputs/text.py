"""Text and tokens: encoding what a request says, decoding an answer as it grows.

Knows the tokenizer of one bundle; deliberately neither models nor HTTP.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from serve.bundle import Bundle, BundleError, Manifest
from serve.bundle.manifest import inside_file
from serve.errors import Unprocessable
from serve.inputs.encoder import Encoder, Token
from serve.inputs.tokens import check_tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SHORT_TOKENS, _KEPT_TEXTS = 2, 1 << 16  # a token, and one with the token before it


Span = tuple[int, int]  # characters of a text: the first, and the one behind the last


class Encoded(NamedTuple):
    """The tokens of one input, and whether some were left out to make it fit."""

    tokens: list[int]
    truncated: bool = False
    counted: int | None = None  # tokens of the whole text, where they were counted
    spans: tuple[Span, ...] = ()  # of each token, if asked: what it labels of the text


class TextCodec:
    """The tokenizer of a bundle, with the limits of its model."""

    def __init__(self, bundle: Bundle) -> None:
        self._manifest: Manifest = bundle.manifest
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path))
        except Exception as error:  # the library raises plain Exception for whatever is wrong
            raise BundleError(
                f"is no tokenizer that can be read ({error}); export the bundle again",
                file=str(bundle.tokenizer_path),
            ) from error
        # A caller who writes "<pad>" means these five characters, not padding.
        self._tokenizer.encode_special_tokens = True
        self._short: dict[tuple[int, ...], str] = {}  # texts that streams ask for each time
        with inside_file(bundle.tokenizer_path):
            check_tokenizer(self._tokenizer, bundle.manifest.text_tokenizer)
        self._spec = bundle.manifest.text_tokenizer
        special = {self._tokenizer.id_to_token(token) for token in self._spec.special_ids}
        self._encoder = Encoder(self._tokenizer)
        self._characters: dict[str, int] | None = None
        if self._spec.kind == "chars":
            vocab = self._tokenizer.get_vocab()
            self._characters = {text: token for text, token in vocab.items() if text not in special}

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Tokens that no answer contains: padding and the beginning stand for no text."""
        return tuple(token for token in self._spec.special_ids if token != self._spec.eos_id)

    @property
    def bos_id(self) -> int | None:
        """The token that every answer of a translator begins with."""
        return self._spec.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that ends an answer by itself, if there is one."""
        return self._spec.eos_id

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    def encode_prompt(self, text: str, param: str = "prompt") -> list[int]:
        """The tokens of a prompt, or of a source to translate; at most the window of the model."""
        limit = self._manifest.text_input.max_tokens
        encoded = self._encode(text, param, limit, 0)
        if encoded.truncated:
            raise self._too_long(encoded, param, self._shorter)
        return encoded.tokens

    def check_prompt(self, tokens: Sequence[int], param: str) -> list[int]:
        """The tokens of a prompt that came as tokens, if the model can read them."""
        limit = self._manifest.text_input.max_tokens
        if len(tokens) > limit:
            encoded = Encoded(list(tokens[:limit]), truncated=True, counted=len(tokens))
            raise self._too_long(encoded, param, self._shorter)
        for index, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size or token == self._spec.pad_id:
                raise Unprocessable(
                    f"{param}[{index}] is no token of {self._manifest.name}: send ids from 0 to "
                    f"{self.vocab_size - 1}, without {self._spec.pad_id}, which is padding",
                    param=f"{param}[{index}]",
                )
        return list(tokens)

    def encode_input(self, text: str, truncate: bool, param: str = "input") -> Encoded:
        """The tokens of a text to classify, cut as in training if it is too long."""
        head, tail = self._kept
        encoded = self._encode(text, param, head, tail)
        if encoded.truncated and not truncate:
            raise self._too_long(
                encoded,
                param,
                f"shorten it, or allow truncate to keep its first {head}"
                + (f" and last {tail} tokens" if tail else " tokens"),
            )
        return encoded

    def encode_positions(self, text: str, truncate: bool, param: str = "input") -> Encoded:
        """The same tokens, and what each labels: its character, or the word that it begins.

        A word is what stands between spaces. Tokens inside a word label nothing.
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
        """A token is a character, so a long text is cut before it is encoded."""
        self._check_characters(text, known, param)
        if len(text) <= head + tail:
            return Encoded([known[character] for character in text])
        kept = text[:head] + text[len(text) - tail :]
        return Encoded([known[character] for character in kept], truncated=True, counted=len(text))

    @property
    def _kept(self) -> tuple[int, int]:
        """How many of the first and of the last tokens stay of a text that is too long."""
        spec = self._manifest.text_input
        if spec.truncation is None:
            return spec.max_tokens, 0
        return spec.truncation.head, spec.truncation.tail

    @property
    def _shorter(self) -> str:
        if self._manifest.task == "translate":
            return "translate it in parts, for example by sentences"
        return "shorten it, for example to its end"

    def _too_long(self, encoded: Encoded, param: str, advice: str) -> Unprocessable:
        limit = len(encoded.tokens)
        # Of a text that is far too long only the ends are encoded, so nobody has counted.
        known = {} if encoded.counted is None else {"tokens": encoded.counted}
        found = f"more than {limit}" if encoded.counted is None else str(encoded.counted)
        return Unprocessable(
            f"{param} has {found} tokens, but {self._manifest.name} reads at most {limit}: "
            f"{advice}",
            param=param,
            max_tokens=limit,
            **known,
        )

    def _check_characters(self, text: str, known: Mapping[str, int], param: str) -> None:
        if known.keys() >= set(text):
            return
        index, character = next(
            (index, character) for index, character in enumerate(text) if character not in known
        )
        raise Unprocessable(
            f"{param} has the character {character!r} (U+{ord(character):04X}) at index {index}, "
            f"which is outside the vocabulary of {self._manifest.name}: remove or replace it",
            param=param,
            index=index,
            character=character,
        )

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _words(text: str, tokens: Sequence[Token]) -> tuple[Span, ...]:
    """For each token the word that it begins, else nothing."""
    spans: list[Span] = []
    last = -1  # the token that began the latest word
    for token in tokens:
        start, end = token.start, token.end
        spans.append((start, start))
        if not text[start:end].strip():
            continue
        goes_on = last >= 0 and start <= spans[last][1] and not text[start - 1 : start].isspace()
        if goes_on or (last >= 0 and start < spans[last][1]):
            spans[last] = (spans[last][0], max(end, spans[last][1]))
        elif start == 0 or text[start - 1].isspace():  # else of a word whose beginning was cut off
            last = len(spans) - 1
            spans[last] = (start, end)
    return tuple(spans)


class TextStream:
    """The text of an answer while its tokens arrive.

    Bytes of a character that is not complete yet are held back, so the pieces always join to the
    text of the whole; `flush` gives what was held back, decoded as it is.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._context = 0  # first token of the window that is decoded again
        self._written = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """The text that this token completes; often its own, sometimes none."""
        self._tokens.append(token)
        text = self._pending()
        if text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Whatever is left, complete or not."""
        return self._advance(self._pending()) if self._written < len(self._tokens) else ""

    def _pending(self) -> str:
        known = self._codec.decode(self._tokens[self._context : self._written])
        return self._codec.decode(self._tokens[self._context :])[len(known) :]

    def _advance(self, text: str) -> str:
        # The last written tokens stay as context: the text of a token can depend on the one before.
        self._context = self._written
        self._written = len(self._tokens)
        return text
