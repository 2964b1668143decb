"""From the items of a classify request to the rows that a model takes.

Knows which kind a model reads; each kind's own module knows how.
"""

from collections.abc import Sized
from typing import NamedTuple

from serve.bundle import ImageInput, Manifest, PointsInput
from serve.errors import WrongInput
from serve.inputs.images import PixelCount, read_image
from serve.inputs.items import Item
from serve.inputs.points import read_points
from serve.inputs.text import Span, TextCodec
from serve.runtime.protocol import Row

# What an image is taken to cost beside texts, when a call is filled: a token for so many pixels.
_PIXELS_PER_TOKEN = 256
_SHOWS = {
    "text": "text: send a string",
    "image": 'images: send {"image": ...}, a base64 file or nested lists of numbers',
    "points": 'points: send {"points": [[x, ...], ...]}',
}


class Intake(NamedTuple):
    """One row, and whether some of the text was left out to make it fit."""

    row: Row
    truncated: bool = False
    text: str = ""  # of a model that labels its positions
    spans: tuple[Span, ...] = ()  # what each of them labels of it


def check_kinds(items: tuple[Item, ...], manifest: Manifest) -> None:
    """WrongInput, naming what the model takes, unless every item is of its kind."""
    kind = manifest.input.kind
    for item in items:
        if item.kind != kind:
            raise WrongInput(
                f"{item.param} is not what {manifest.name} takes, which is {_SHOWS[kind]}",
                param=item.param,
                input=kind,
            )


def read_items(
    items: tuple[Item, ...], manifest: Manifest, codec: TextCodec | None, truncate: bool
) -> list[Intake]:
    """The rows of items whose kinds have been checked; only texts need a codec."""
    spec = manifest.input
    if isinstance(spec, ImageInput):
        count = PixelCount()
        return [Intake(read_image(item.value, spec, count, item.param)) for item in items]
    if isinstance(spec, PointsInput):
        return [Intake(read_points(item.value, spec, item.param)) for item in items]
    assert codec is not None, "texts are read by a codec"
    if manifest.task == "tag":
        return [_positions(item, codec, truncate) for item in items]
    encoded = [codec.encode_input(item.value, truncate, item.param) for item in items]
    return [Intake(one.tokens, one.truncated) for one in encoded]


def _positions(item: Item, codec: TextCodec, truncate: bool) -> Intake:
    encoded = codec.encode_positions(item.value, truncate, item.param)
    return Intake(encoded.tokens, encoded.truncated, item.value, encoded.spans)


def greatest_length(manifest: Manifest) -> int:
    """What `row_length` says of the largest row that there may be."""
    spec = manifest.input
    if isinstance(spec, ImageInput):
        return _image_length(spec)
    return spec.max_points if isinstance(spec, PointsInput) else spec.max_tokens


def row_length(row: Sized, manifest: Manifest) -> int:
    """How much of a call a row fills, in tokens or points."""
    spec = manifest.input
    if isinstance(spec, ImageInput):
        return _image_length(spec)
    return len(row)


def _image_length(spec: ImageInput) -> int:
    return -(-spec.height * spec.width // _PIXELS_PER_TOKEN)
