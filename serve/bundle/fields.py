"""Checks of single values in the JSON files of a bundle, and the error that names a bad one.

Knows nothing of what the values mean: the dataclasses of a bundle say that.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 4 << 20
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KINDS = {
    dict: "an object",
    list: "a list",
    tuple: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


class BundleError(ValueError):
    """A bundle that cannot be used: says which file and field, and what to do."""

    def __init__(self, problem: str, *, field: str = "", file: str = "") -> None:
        self.problem = problem
        self.field = field
        self.file = file
        sentence = f"{field} {problem}" if field else problem
        super().__init__(f"{file}: {sentence}" if file else sentence)


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Prefix the field of a BundleError raised below with the field that holds it."""
    try:
        yield
    except BundleError as error:
        glue = "." if error.field and not error.field.startswith("[") else ""
        outer = f"{field}{glue}{error.field}"
        raise BundleError(error.problem, field=outer, file=error.file) from None


@contextmanager
def inside_file(path: Path) -> Iterator[None]:
    """Say in a BundleError raised below which file it is about."""
    try:
        yield
    except BundleError as error:
        file = error.file or str(path)
        raise BundleError(error.problem, field=error.field, file=file) from None


def kind_of(value: object) -> str:
    """The word for a value's JSON type, for messages."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def shown(value: object) -> str:
    """A value as messages show it: enough to recognise it, however large it is."""
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "that many"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_members(value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    """An object with exactly these keys."""
    if not isinstance(value, dict):
        raise BundleError(f"must be an object, not {kind_of(value)}", field="")
    for key in keys:
        if key not in value:
            raise BundleError("is missing; export the bundle again", field=key)
    for key in value:
        if key not in keys:
            raise BundleError(
                f"is not a known key; the keys here are {', '.join(keys)}: remove it, or serve "
                "the bundle with the release that wrote it",
                field=str(key),
            )
    return value


def check_list(field: str, value: object, high: int) -> list[Any]:
    """A list of at most `high` items."""
    if not isinstance(value, list):
        raise BundleError(f"must be a list, not {kind_of(value)}", field=field)
    if len(value) > high:
        raise BundleError(f"has {len(value)} items; at most {high} are allowed", field=field)
    return value


def check_integer(field: str, value: object, low: int, high: int) -> None:
    """An integer in [low, high]; a boolean is none."""
    if type(value) is not int:
        raise BundleError(f"must be an integer, not {kind_of(value)}", field=field)
    if not low <= value <= high:
        raise BundleError(f"must be from {low} to {high}, not {shown(value)}", field=field)


def check_number(field: str, value: object, low: float, high: float) -> None:
    """A finite number in [low, high]; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BundleError(f"must be a number, not {kind_of(value)}", field=field)
    if isinstance(value, float) and not math.isfinite(value):
        raise BundleError(f"must be a finite number, not {value}; measure it again", field=field)
    if not low <= value <= high:
        raise BundleError(f"must be from {low:g} to {high:g}, not {shown(value)}", field=field)


def check_flag(field: str, value: object) -> None:
    """True or false."""
    if type(value) is not bool:
        raise BundleError(f"must be a boolean, not {kind_of(value)}", field=field)


def check_text(field: str, value: object, max_length: int = 10_000) -> None:
    """A string that is neither empty nor huge."""
    if not isinstance(value, str):
        raise BundleError(f"must be a string, not {kind_of(value)}", field=field)
    if not 0 < len(value) <= max_length:
        raise BundleError(
            f"must have from 1 to {max_length} characters, not {len(value)}", field=field
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BundleError("holds half a surrogate pair, which is no text", field=field) from None


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices or not isinstance(value, str):
        words = ", ".join(choices)
        raise BundleError(f"must be one of {words}, not {shown(value)}", field=field)


def check_file_name(field: str, value: object) -> None:
    """A plain file name, so that no path can leave the folder of the bundle."""
    check_text(field, value)
    if FILE_NAME.fullmatch(str(value)) is None:
        raise BundleError(
            f"is {shown(value)}, which is no plain file name: letters, digits, '.', '_' and '-' "
            "only, a letter or digit first, at most 128 characters; the files of a bundle lie "
            "flat in its folder",
            field=field,
        )


def check_facts(field: str, value: object) -> None:
    """A free object that JSON can hold: string keys, finite numbers, no cycle."""
    if not isinstance(value, Mapping):
        raise BundleError(f"must be an object, not {kind_of(value)}", field=field)
    try:
        text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False)
        same = json.loads(text.encode()) == plain(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BundleError(f"cannot be written as JSON ({error})", field=field) from None
    if not same:
        raise BundleError("has keys that are no strings; JSON has only those", field=field)


def plain(value: object) -> Any:
    """Dataclasses, tuples and mappings as the dicts and lists of JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def parse_json(text: str | bytes) -> object:
    """JSON as the standard has it: no NaN, no infinity, no repeated key."""
    try:
        return json.loads(
            text, parse_constant=_no_constant, object_pairs_hook=_unique, parse_float=_finite
        )
    except BundleError:
        raise
    except (ValueError, RecursionError) as error:
        raise BundleError(f"is not valid JSON ({error}); copy or export the bundle again") from None


def read_json(path: Path) -> object:
    """The JSON value in a file, refused when absent, huge or malformed."""
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise BundleError(f"cannot be read ({error.strerror or error})", file=str(path)) from None
    with inside_file(path):
        if len(text) > MAX_JSON_BYTES:
            raise BundleError(f"is larger than {MAX_JSON_BYTES} bytes, so it is no bundle's file")
        return parse_json(text)


def _no_constant(word: str) -> float:
    raise BundleError(f"holds {word}, which JSON does not have; measure that value again")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BundleError(f"holds the number {digits[:40]}, which is too large for a float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BundleError(f"repeats the key {repeated!r}; keep one of them")
    return result
