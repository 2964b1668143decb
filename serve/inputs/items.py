"""What a classify request sends: texts, images and clouds of points, each with its place.

Knows shapes only; deliberately neither what an image holds nor what a model takes.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints

from serve.errors import InvalidField
from serve.inputs.arrays import LARGEST

MAX_INPUTS = 64

Kind = Literal["text", "image", "points"]
Text = Annotated[str, StringConstraints(min_length=1)]
_SAYS = 'a string, {"image": ...} or {"points": ...}'


_Row = Annotated[list[Annotated[float, Field(ge=0, le=255)]], Field(min_length=1)]
_Pixels = Annotated[list[_Row], Field(min_length=1)]
_Coordinate = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Point = Annotated[list[_Coordinate], Field(min_length=1)]


class ImageItem(BaseModel):
    """A picture, for a model whose input is `image`."""

    model_config = ConfigDict(extra="forbid")

    image: Text | _Pixels | Annotated[list[_Pixels], Field(min_length=1)] = Field(
        description="A PNG, JPEG, WebP, GIF or BMP file in base64, also behind `data:image/png;"
        "base64,`; or nested lists (height, width) or (height, width, channels) of integers from "
        "0 to 255, or of numbers from 0.0 to 1.0, of which at least one has a decimal point. It "
        "is resized and converted to the size and channels of the model."
    )


class PointsItem(BaseModel):
    """A cloud of points, for a model whose input is `points`."""

    model_config = ConfigDict(extra="forbid")

    points: Annotated[list[_Point], Field(min_length=1)] = Field(
        description="One list of coordinates a point, in any order. The cloud is centred on its "
        "mean and scaled so that its farthest point is at distance 1."
    )


@dataclass(frozen=True, slots=True)
class Item:
    """One input, not read yet."""

    kind: Kind
    value: Any
    param: str  # where it stands in the request

    @property
    def characters(self) -> int | None:
        """How long a text is; None for what takes time to read whatever its length."""
        return len(self.value) if self.kind == "text" else None


def check_items(value: object) -> tuple[Item, ...]:
    """The inputs of a request, in their order; InvalidField unless they have the right shape."""
    if not isinstance(value, list):
        return (_item(value, "input", f"{_SAYS}, or a list of these"),)
    if not value:
        raise InvalidField("input is an empty list: send at least 1 item", param="input")
    if len(value) > MAX_INPUTS:
        raise InvalidField(
            f"input has {len(value)} items: send at most {MAX_INPUTS}", param="input"
        )
    return tuple(_item(one, f"input[{index}]", _SAYS) for index, one in enumerate(value))


def _item(value: object, param: str, says: str) -> Item:
    if isinstance(value, str):
        if not value:
            raise InvalidField(f"{param} is empty: send some text", param=param)
        return Item("text", value, param)
    if isinstance(value, dict) and len(value) == 1:
        if "image" in value:
            return Item("image", value["image"], f"{param}.image")
        if "points" in value:
            return Item("points", value["points"], f"{param}.points")
    raise InvalidField(f"{param} must be {says}", param=param)


Items = Annotated[
    tuple[Item, ...],
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
