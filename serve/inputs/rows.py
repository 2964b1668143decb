"""Request inputs and tensors, turned into the rows that a model takes."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints

from serve.bundle import ImageInput, Manifest, PointsInput
from serve.errors import InvalidField, Unprocessable, WrongInput
from serve.inputs.images import LARGEST, PixelCount, check_list, normalised, number_rows, read_image
from serve.inputs.text import Span, TextCodec
from serve.runtime.protocol import FloatArray, Row

# Inputs as requests send them, each with its place in the body.


MAX_INPUTS = 64

Kind = Literal["text", "image", "points"]
Text = Annotated[str, StringConstraints(min_length=1)]
_SAYS = 'a string, {"image": ...} or {"points": ...}'


_Row = Annotated[list[Annotated[float, Field(ge=0, le=255)]], Field(min_length=1)]
_Pixels = Annotated[list[_Row], Field(min_length=1)]
_Coordinate = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Point = Annotated[list[_Coordinate], Field(min_length=1)]


class ImageItem(BaseModel):
    """An image, for a model whose input is `image`."""

    model_config = ConfigDict(extra="forbid")

    image: Text | _Pixels | Annotated[list[_Pixels], Field(min_length=1)] = Field(
        description="A PNG, JPEG, WebP, GIF or BMP file in base64, optionally after "
        "`data:image/png;base64,`; or nested lists (height, width) or (height, "
        "width, channels) of integers from 0 to 255, or of numbers from 0.0 to 1.0, "
        "of which at least one must have a decimal point. It is resized and "
        "converted to the size and channels of the model."
    )


class PointsItem(BaseModel):
    """A cloud of points, for a model whose input is `points`."""

    model_config = ConfigDict(extra="forbid")

    points: Annotated[list[_Point], Field(min_length=1)] = Field(
        description="One list of coordinates per point, in any order. The cloud is centred on "
        "its mean and scaled so that its farthest point is at distance 1."
    )


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a request, not read yet."""

    kind: Kind
    value: Any
    param: str  # its place in the request


def check_items(value: object) -> tuple[Input, ...]:
    """The inputs of a request, in order; InvalidField if they are malformed."""
    if not isinstance(value, list):
        return (_item(value, "input", f"{_SAYS}, or a list of these"),)
    if not value:
        raise InvalidField("input is an empty list: send at least 1 item", param="input")
    if len(value) > MAX_INPUTS:
        raise InvalidField(
            f"input has {len(value)} items: send at most {MAX_INPUTS}", param="input"
        )
    return tuple(_item(one, f"input[{index}]", _SAYS) for index, one in enumerate(value))


def _item(value: object, param: str, says: str) -> Input:
    if isinstance(value, str):
        if not value:
            raise InvalidField(f"{param} is empty: send some text", param=param)
        return Input("text", value, param)
    if isinstance(value, dict) and len(value) == 1:
        if "image" in value:
            return Input("image", value["image"], f"{param}.image")
        if "points" in value:
            return Input("points", value["points"], f"{param}.points")
    raise InvalidField(f"{param} must be {says}", param=param)


Items = Annotated[
    tuple[Input, ...],
    PlainValidator(
        check_items,
        json_schema_input_type=Text
        | ImageItem
        | PointsItem
        | Annotated[
            list[Text | ImageItem | PointsItem], Field(min_length=1, max_length=MAX_INPUTS)
        ],
    ),
]


def check_texts(value: object) -> tuple[Input, ...]:
    """The texts of a request, in order; InvalidField if they are malformed."""
    for index, one in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(one, str):
            param = f"input[{index}]" if isinstance(value, list) else "input"
            raise InvalidField(
                f"{param} must be a string: this server reads texts, not tokens", param=param
            )
    return check_items(value)


Texts = Annotated[
    tuple[Input, ...],
    PlainValidator(
        check_texts,
        json_schema_input_type=Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)],
    ),
]


# Clouds of points, normalised as in training.


def read_points(value: object, spec: PointsInput, param: str) -> FloatArray:
    """Points (N, dimensions) centred on their mean and scaled so that the farthest is at distance
    1.
    """
    rows = check_list(value, param)
    if len(rows) > spec.max_points:
        raise Unprocessable(
            f"{param} has {len(rows)} points, but the model takes at most {spec.max_points}: leave "
            "some out",
            param=param,
            max_points=spec.max_points,
        )
    points, _ = number_rows(rows, param)  # (N, dimensions)
    if points.shape[1] != spec.dimensions:
        raise Unprocessable(
            f"{param} has points of {points.shape[1]} numbers, but the model takes "
            f"{spec.dimensions}: send [[x, ...], ...] with {spec.dimensions} numbers a point",
            param=param,
        )
    return unit_cloud(points)


def unit_cloud(points: npt.NDArray[np.float64]) -> FloatArray:
    """The points (N, dimensions) centred on their mean and scaled to distance 1."""
    if (points == points[0]).all():  # rounding can make the mean of equal numbers differ from them
        return np.zeros(points.shape, dtype=np.float32)
    points = points - points.mean(axis=0)
    # In two steps, so that the square of a tiny number does not become 0.
    points /= np.abs(points).max()
    points /= np.sqrt((points**2).sum(axis=1)).max()
    cloud: FloatArray = points.astype(np.float32)
    return cloud


# The size of an image in a batch, compared with texts: one token per so many pixels.
_PIXELS_PER_TOKEN = 256
_SHOWS = {
    "text": "text: send a string",
    "image": 'images: send {"image": ...}, a base64 file or nested lists of numbers',
    "points": 'points: send {"points": [[x, ...], ...]}',
}


class InputRow(NamedTuple):
    """One row, and whether its text was cut to fit."""

    row: Row
    truncated: bool = False
    text: str = ""  # for models that label tokens
    spans: tuple[Span, ...] = ()  # the part of the text that each token labels


def check_kinds(items: tuple[Input, ...], manifest: Manifest) -> None:
    """WrongInput, naming what the model takes, if an input is of another kind."""
    kind = manifest.input.kind
    for item in items:
        if item.kind != kind:
            raise WrongInput(
                f"{item.param} is not what {manifest.name} takes, which is {_SHOWS[kind]}",
                param=item.param,
                input=kind,
            )


def read_items(
    items: tuple[Input, ...], manifest: Manifest, codec: TextCodec | None, truncate: bool
) -> list[InputRow]:
    """The rows of inputs whose kinds were checked; only texts need a codec."""
    spec = manifest.input
    if isinstance(spec, ImageInput):
        count = PixelCount()
        return [InputRow(read_image(item.value, spec, count, item.param)) for item in items]
    if isinstance(spec, PointsInput):
        return [InputRow(read_points(item.value, spec, item.param)) for item in items]
    assert codec is not None, "texts are read by a codec"
    if manifest.task == "tag":
        encoded = [codec.encode_positions(item.value, truncate, item.param) for item in items]
        return [
            InputRow(one.tokens, one.truncated, item.value, one.spans)
            for item, one in zip(items, encoded, strict=True)
        ]
    encoded = [codec.encode_input(item.value, truncate, item.param) for item in items]
    return [InputRow(one.tokens, one.truncated) for one in encoded]


def least_length(manifest: Manifest) -> int:
    """`row_length` of the smallest possible row."""
    spec = manifest.input
    return _image_length(spec) if isinstance(spec, ImageInput) else 1


def greatest_length(manifest: Manifest) -> int:
    """`row_length` of the largest possible row."""
    spec = manifest.input
    if isinstance(spec, ImageInput):
        return _image_length(spec)
    return spec.max_points if isinstance(spec, PointsInput) else spec.max_tokens


def row_length(row: Sized, manifest: Manifest) -> int:
    """The size of a row in a batch, in tokens or points."""
    spec = manifest.input
    if isinstance(spec, ImageInput):
        return _image_length(spec)
    return len(row)


def _image_length(spec: ImageInput) -> int:
    return -(-spec.height * spec.width // _PIXELS_PER_TOKEN)


# Images and clouds of points that were sent as tensors.


Numbers = npt.NDArray[np.float64]


def image_rows(tensor: Numbers, whole: bool, spec: ImageInput, param: str) -> list[InputRow]:
    """Rows from images (B, C, H, W) of the model's size, from 0 to 255 if integers, else to 1."""
    if not whole and (tensor.min() < 0 or tensor.max() > 1):
        worst = tensor.min() if tensor.min() < 0 else tensor.max()
        raise Unprocessable(
            f"{param} has the value {worst:g}: send FP32 from 0 to 1, or UINT8", param=param
        )
    pixels = (tensor.astype(np.float32) / np.float32(255 if whole else 1)).transpose(0, 2, 3, 1)
    return [InputRow(normalised(one, spec)) for one in pixels]  # (H, W, C) each


def cloud_rows(tensor: Numbers) -> list[InputRow]:
    """Rows from clouds (B, N, dimensions)."""
    return [InputRow(unit_cloud(cloud)) for cloud in tensor]
