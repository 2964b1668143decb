"""Inputs as requests send them: items to classify, arrays of numbers, prompts, each with its place
in the body.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints

from serve.errors import InvalidField
from serve.inputs.text import TextCodec

# Lists of numbers from JSON as arrays, strictly checked. Errors name the wrong number.


_NUMBERS = {int, float}
LARGEST = 1e30


def check_list(value: object, param: str) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else "no list"
        raise InvalidField(f"{param} is {found}: send a list of numbers", param=param)
    return value


def number_rows(rows: list[Any], param: str) -> tuple[npt.NDArray[np.float64], bool]:
    """Rows of equally many finite numbers (R, K), and whether all were written as integers."""
    kinds: set[type] = set()
    for index, row in enumerate(rows):
        row = check_list(row, f"{param}[{index}]")
        if len(row) != len(rows[0]):
            raise InvalidField(
                f"{param}[{index}] has {len(row)} numbers, but the first has {len(rows[0])}: make "
                "all equally long",
                param=param,
            )
        kinds |= set(map(type, row))
    if not kinds <= _NUMBERS:
        raise InvalidField(f"{param} holds {_word(kinds)}: send numbers only", param=param)
    try:
        array = np.array(rows, dtype=np.float64)
    except OverflowError:
        array = np.array([[np.inf]])
    check_finite(array, param)
    return array, float not in kinds


def check_finite(array: npt.NDArray[np.float64], param: str) -> None:
    """InvalidField for a number that is not finite, or absurdly large."""
    if not (np.abs(array) <= LARGEST).all():  # false for NaN too
        raise InvalidField(
            f"{param} holds a number that is not finite, or beyond {LARGEST:g}: send finite "
            "numbers",
            param=param,
        )


def _word(kinds: set[type]) -> str:
    words = {
        str: "text",
        bool: "true or false",
        type(None): "null",
        list: "a list",
        dict: "an object",
    }
    return words[next(kind for kind in words if kind in kinds)]


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

    @property
    def characters(self) -> int | None:
        """The length of a text; None for inputs whose reading time does not depend on length."""
        return len(self.value) if self.kind == "text" else None


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


# Prompts of completions: one or several texts or lists of tokens.


# Texts per request: as many as one batch decodes by default, so that they do not wait for each
# other.
MAX_TEXTS = 16
# More than any model's window; the model's own limit is checked later.
MAX_PROMPT_TOKENS = 2**17
_PROMPTS_SAYS = "a string, or a list of tokens"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, not read yet."""

    value: str | tuple[int, ...]
    param: str  # its place in the request

    @property
    def characters(self) -> int:
        """The length of the text to encode."""
        return len(self.value) if isinstance(self.value, str) else 0

    def read(self, codec: TextCodec) -> list[int]:
        """The tokens, if the model can read them."""
        if isinstance(self.value, str):
            return codec.encode_prompt(self.value, self.param)
        return codec.check_prompt(self.value, self.param)

    def text(self, codec: TextCodec) -> str:
        """The text of the prompt."""
        return self.value if isinstance(self.value, str) else codec.decode(list(self.value))


def check_prompts(value: object) -> tuple[Prompt, ...]:
    """The prompts of a request, in order; InvalidField if they are malformed."""
    if not isinstance(value, list) or (value and _is_token(value[0])):
        return (_prompt(value, "prompt", f"{_PROMPTS_SAYS}, or a list of these"),)
    if not value:
        raise InvalidField("prompt is an empty list: send at least 1 item", param="prompt")
    if len(value) > MAX_TEXTS:
        raise InvalidField(
            f"prompt has {len(value)} items: send at most {MAX_TEXTS}", param="prompt"
        )
    return tuple(_prompt(one, f"prompt[{index}]", _PROMPTS_SAYS) for index, one in enumerate(value))


def _prompt(value: object, param: str, says: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise InvalidField(f"{param} is empty: send some text", param=param)
        return Prompt(value, param)
    if isinstance(value, list):
        if not value:
            raise InvalidField(f"{param} is empty: send at least 1 token", param=param)
        if len(value) > MAX_PROMPT_TOKENS:
            raise InvalidField(
                f"{param} has {len(value)} tokens: send at most {MAX_PROMPT_TOKENS}", param=param
            )
        if set(map(type, value)) == {int}:
            return Prompt(tuple(value), param)
        for index, token in enumerate(value):
            if not _is_token(token):
                raise InvalidField(
                    f"{param}[{index}] must be a token, which is an integer",
                    param=f"{param}[{index}]",
                )
        return Prompt(tuple(map(int, value)), param)
    raise InvalidField(f"{param} must be {says}", param=param)


def _is_token(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer()  # JSON has only numbers: 4.0 is the integer 4
    return isinstance(value, int) and not isinstance(value, bool)


_Tokens = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(
        check_prompts,
        json_schema_input_type=Text
        | _Tokens
        | Annotated[list[Text | _Tokens], Field(min_length=1, max_length=MAX_TEXTS)],
    ),
]
