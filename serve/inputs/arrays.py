"""Lists of numbers from JSON as arrays: strict about what is a number, and naming what is not.

Knows neither images nor points.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from serve.errors import InvalidField

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
    """InvalidField where a number is not finite, or too large to be meant."""
    if not (np.abs(array) <= LARGEST).all():  # also false for NaN
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
