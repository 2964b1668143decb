"""What a model takes: text, images or clouds of points, and how much of each fits.

Knows sizes and their limits; not how a request says these things.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from serve.bundle.fields import (
    BundleError,
    check_choice,
    check_integer,
    check_list,
    check_members,
    check_number,
    inside,
    kind_of,
)

MAX_TOKENS = 1 << 20
MAX_CHANNELS = 4
MAX_SIDE = 4096
MAX_POINTS = 1 << 16
MAX_DIMENSIONS = 16
INPUT_KINDS = ("text", "image", "points")
_HUGE = 1e6


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """Tokens; of a translator, those of the source."""

    kind: Literal["text"] = "text"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """Images of one size; a value from 0 to 1 reaches the graph as (value - mean) / std."""

    kind: Literal["image"] = "image"
    channels: int  # 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("image",))
        check_integer("channels", self.channels, 1, MAX_CHANNELS)
        check_integer("height", self.height, 1, MAX_SIDE)
        check_integer("width", self.width, 1, MAX_SIDE)
        for field, values, low in (("mean", self.mean, -_HUGE), ("std", self.std, 1e-6)):
            if len(values) != self.channels:
                raise BundleError(
                    f"has {len(values)} numbers for {self.channels} channels; give one each",
                    field=field,
                )
            for index, value in enumerate(values):
                check_number(f"{field}[{index}]", value, low, _HUGE)

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("kind", "channels", "height", "width", "mean", "std")
        members = dict(check_members(value, keys))
        for field in ("mean", "std"):
            members[field] = tuple(check_list(field, members[field], MAX_CHANNELS))
        return cls(**members)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsInput:
    """Clouds of up to `max_points` points, each centred and scaled into the unit sphere."""

    kind: Literal["points"] = "points"
    max_points: int
    dimensions: int

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("points",))
        check_integer("max_points", self.max_points, 1, MAX_POINTS)
        check_integer("dimensions", self.dimensions, 1, MAX_DIMENSIONS)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("kind", "max_points", "dimensions")))


InputSpec = TextInput | ImageInput | PointsInput


def read_input(value: object) -> InputSpec:
    """The input that a manifest describes; its `kind` says which keys there are."""
    if not isinstance(value, dict):
        raise BundleError(f"must be an object, not {kind_of(value)}")
    members: dict[str, Any] = value
    if "kind" not in members:
        raise BundleError("is missing; export the bundle again", field="kind")
    check_choice("kind", members["kind"], INPUT_KINDS)
    if members["kind"] == "text":
        return TextInput.from_json(members)
    if members["kind"] == "image":
        return ImageInput.from_json(members)
    return PointsInput.from_json(members)
