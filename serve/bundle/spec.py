"""The parts of a manifest that describe a model: tokenizer, shape, step; and a file's entry.

Knows no rule that spans two parts: the manifest has those.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

from serve.bundle.fields import (
    BundleError,
    check_choice,
    check_file_name,
    check_integer,
    check_members,
)

TokenizerKind = Literal["chars", "bpe", "words", "wordpiece", "unigram"]
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Where the tokenizer is, and the facts that the graphs rely on."""

    kind: TokenizerKind
    file: str
    pad_id: int
    vocab_size: int
    bos_id: int | None = None  # begins every answer of a translator
    eos_id: int | None = None  # ends it
    chat_template: str | None = None  # the file that says how messages become a prompt

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(TokenizerKind))
        check_file_name("file", self.file)
        if self.chat_template is not None:
            check_file_name("chat_template", self.chat_template)
        check_integer("vocab_size", self.vocab_size, 1, 1 << 24)
        check_integer("pad_id", self.pad_id, 0, self.vocab_size - 1)
        taken = {self.pad_id: "pad_id"}
        for field, token in (("bos_id", self.bos_id), ("eos_id", self.eos_id)):
            if token is None:
                continue
            check_integer(field, token, 0, self.vocab_size - 1)
            if token in taken:
                raise BundleError(
                    f"is {token}, like {taken[token]}; each needs a token of its own", field=field
                )
            taken[token] = field

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that no text turns into."""
        ids = (self.pad_id, self.bos_id, self.eos_id)
        return tuple(token for token in ids if token is not None)

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            value = {"chat_template": None} | value
        keys = ("kind", "file", "pad_id", "vocab_size", "bos_id", "eos_id", "chat_template")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one velocity; the caches of a decoder follow from it."""

    layers: int
    heads: int
    head_width: int
    width: int
    parameters: int
    state: int | None = None  # of a decoder's graphs of one step, where it has more than the width

    def __post_init__(self) -> None:
        check_integer("layers", self.layers, 1, 1024)
        check_integer("heads", self.heads, 1, 1024)
        check_integer("head_width", self.head_width, 1, 4096)
        check_integer("width", self.width, 1, 1 << 16)
        check_integer("parameters", self.parameters, 1, 10**12)
        if self.state is not None:
            check_integer("state", self.state, self.width, 1 << 17)

    @property
    def state_width(self) -> int:
        """Of a decoder's state between steps: beside x it may hold what every step sees again."""
        return self.width if self.state is None else self.state

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            value = {"state": None} | value
        keys = ("layers", "heads", "head_width", "width", "parameters", "state")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The graphs of one step: what comes before it, the step, and what reads the answer."""

    embed: str
    step: str
    head: str

    def __post_init__(self) -> None:
        for field, file in self.graphs.items():
            check_file_name(field, file)

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs by their field."""
        return {"embed": self.embed, "step": self.step, "head": self.head}

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            # Earlier releases named a graph for rows of several rungs, which nothing runs now.
            value = {key: item for key, item in value.items() if key not in ("mixed", "groups")}
        return cls(**check_members(value, ("embed", "step", "head")))


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
