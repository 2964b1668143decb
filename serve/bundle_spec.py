"""The parts of a manifest that describe a model: input, tokenizer, shape; and a file's entry.

Knows no rule that spans two parts: the manifest has those.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self

from serve.bundle_fields import (
    BundleError,
    check_choice,
    check_file_name,
    check_integer,
    check_members,
    inside,
)

MAX_TOKENS = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Of a text that is too long, its first `head` and its last `tail` tokens stay."""

    head: int
    tail: int

    def __post_init__(self) -> None:
        check_integer("head", self.head, 0, MAX_TOKENS)
        check_integer("tail", self.tail, 0, MAX_TOKENS)
        if self.head + self.tail == 0:
            raise BundleError(
                "must be at least 1 when tail is 0: some token must stay", field="head"
            )

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("head", "tail")))


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What one input of the model is, and how much of it fits."""

    kind: Literal["text"]
    max_tokens: int
    truncation: Truncation | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("text",))
        check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        if self.truncation is not None:
            kept_tokens = self.truncation.head + self.truncation.tail
            if kept_tokens > self.max_tokens:
                raise BundleError(
                    f"keeps {kept_tokens} tokens, more than max_tokens ({self.max_tokens}); "
                    "lower head or tail",
                    field="truncation",
                )

    @classmethod
    def from_json(cls, value: object) -> Self:
        members = dict(check_members(value, ("kind", "max_tokens", "truncation")))
        if members["truncation"] is not None:
            with inside("truncation"):
                members["truncation"] = Truncation.from_json(members["truncation"])
        return cls(**members)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Where the tokenizer is, and the facts that the graphs rely on."""

    kind: Literal["chars", "bpe"]
    file: str
    pad_id: int
    vocab_size: int

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("chars", "bpe"))
        check_file_name("file", self.file)
        check_integer("vocab_size", self.vocab_size, 1, 1 << 24)
        check_integer("pad_id", self.pad_id, 0, self.vocab_size - 1)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("kind", "file", "pad_id", "vocab_size")))


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one velocity; the caches of a decoder follow from it."""

    layers: int
    heads: int
    head_width: int
    width: int
    parameters: int

    def __post_init__(self) -> None:
        check_integer("layers", self.layers, 1, 1024)
        check_integer("heads", self.heads, 1, 1024)
        check_integer("head_width", self.head_width, 1, 4096)
        check_integer("width", self.width, 1, 1 << 16)
        check_integer("parameters", self.parameters, 1, 10**12)

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("layers", "heads", "head_width", "width", "parameters")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file of the bundle must be."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.sha256, str) or _SHA256.fullmatch(self.sha256) is None:
            raise BundleError("must be 64 lower-case hexadecimal digits", field="sha256")
        check_integer("bytes", self.bytes, 0, 1 << 40)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("sha256", "bytes")))
