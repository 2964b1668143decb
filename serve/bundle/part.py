"""JSON files of a bundle: how they are read, and what all their objects have in common.

An object is a class made by `part`: pydantic checks its members, and where one is wrong a
BundleError names it and says what to do.
"""

import itertools
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic import dataclasses as checked_dataclasses
from pydantic_core import CoreSchema, ErrorDetails

MAX_JSON_BYTES = 4 << 20
_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


class BundleError(ValueError):
    """A bundle that cannot be used: names the file and field, and what to do."""

    def __init__(self, problem: str, *, field: str = "", file: str = "") -> None:
        self.problem = problem
        self.field = field
        self.file = file
        sentence = f"{field} {problem}" if field else problem
        super().__init__(f"{file}: {sentence}" if file else sentence)


@contextmanager
def inside_file(path: Path) -> Iterator[None]:
    """Name the file of a BundleError raised inside."""
    try:
        yield
    except BundleError as error:
        file = error.file or str(path)
        raise BundleError(error.problem, field=error.field, file=file) from None


def shown(value: object) -> str:
    """A value for messages: short enough, however large it is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 200:
        return "that many"
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# JSON as the standard has it.


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
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise BundleError(f"repeats the key {shown(repeated)}; keep one of them")
    return result


# The types of members. A boolean is no integer, and text is text.


FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
SHA256 = r"^[0-9a-f]{64}$"
_PATTERNS = {
    FILE_NAME: ", which is no plain file name: letters, digits, '.', '_' and '-' only, a letter or "
    "digit first, at most 128 characters; the files of a bundle lie flat in its folder",
    SHA256: ", but must be 64 lower-case hexadecimal digits; export the bundle again",
    _NAME: "; use 1 to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first",
}


Flag = Annotated[bool, Field(strict=True)]
FileName = Annotated[str, Field(strict=True, pattern=FILE_NAME)]
Name = Annotated[str, Field(strict=True, pattern=_NAME)]
Sha256 = Annotated[str, Field(strict=True, pattern=SHA256)]


def between(low: float, high: float) -> Any:
    """The numbers from `low` to `high`."""
    return Field(strict=True, ge=low, le=high)


def text(most: int = 10_000) -> Any:
    """Text that is neither empty nor huge."""
    return Field(strict=True, min_length=1, max_length=most)


def several(most: int, least: int = 0, **schema: Any) -> Any:
    """A list of so many items; the first wrong one ends the check, so that none takes long."""
    return Field(max_length=most, min_length=least, fail_fast=True, json_schema_extra=schema)


def plain(value: object) -> Any:
    """Objects, tuples and mappings as the dicts and lists of JSON."""
    if isinstance(value, Part):
        return {name: plain(getattr(value, name)) for name in _members(type(value))}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _check_facts(value: Mapping[str, object]) -> Mapping[str, object]:
    try:
        again = json.loads(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
        same = again == value or again == plain(value)  # tuples are lists in JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise BundleError(f"cannot be written as JSON ({error})") from None
    if not same:
        raise BundleError("has keys that are no strings; JSON has only those")
    return value


# A free object that JSON can hold: string keys, finite numbers, no cycle.
Facts = Annotated[Mapping[str, object], AfterValidator(_check_facts)]


# Rules between members, written as in a JSON schema, so that the schema has them too.


NULL = {"type": "null"}
GIVEN = {"not": NULL}


def one_of(*words: object) -> dict[str, Any]:
    """The schema of a member that is one of these words."""
    return {"enum": list(words)}


@dataclass(frozen=True, slots=True)
class Rule:
    """Where each member of `when` is one of its words, those of `then` are of their schema.

    A member inside another is `input.kind`; `rungs[].steps` is that of every rung.
    """

    when: Mapping[str, tuple[object, ...]]
    then: Mapping[str, Mapping[str, Any]]

    def check(self, part: object) -> None:
        """BundleError if these members break the rule."""
        given = {path: value for path in self.when for _, value in _found(part, path)}
        if any(given[path] not in words for path, words in self.when.items()):
            return
        where = " and ".join(f"{path} is {_word(value)}" for path, value in given.items())
        for path, schema in self.then.items():
            for field, value in _found(part, path):
                if not _fits(value, schema):
                    raise BundleError(f"{_words(schema)} where {where}", field=field)

    def schema(self, optional: Mapping[str, object]) -> dict[str, Any]:
        """The rule for a JSON schema; optional members may be absent, and have this value then."""
        needed = [
            path.partition(".")[0]
            for path, words in self.when.items()
            if path not in optional or optional[path] not in words
        ]
        given = [path for path in self.then if path in optional and self.then[path] is GIVEN]
        return {
            "if": {**_merged(self.when, lambda words: {"enum": list(words)}), "required": needed},
            "then": {**_merged(self.then, dict), **({"required": given} if given else {})},
        }


def _found(part: object, path: str) -> Iterator[tuple[str, object]]:
    """The members of this path, each with its own; none where an object has none of this name."""
    name, _, rest = path.partition(".")
    each = name.removesuffix("[]")
    if not hasattr(part, each):
        return
    value = getattr(part, each)
    if not rest:
        yield each, value
        return
    inner = [(f"{each}[{at}]", one) for at, one in enumerate(value)] if name != each else []
    for field, one in inner or [(each, value)]:
        for last, found in _found(one, rest):
            yield f"{field}.{last}", found


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "minimum" in schema:
        return bool(schema["minimum"] <= value <= schema["maximum"])
    return value in schema["enum"] if "enum" in schema else (value is None) == ("type" in schema)


def _words(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema:
        return f"must be from {schema['minimum']} to {schema['maximum']}"
    if "enum" in schema:
        return f"must be {' or '.join(map(_word, schema['enum']))}"
    return "must be null" if "type" in schema else "must not be null"


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _merged(paths: Mapping[str, Any], leaf: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The schema of an object with these members, each at its path."""
    schema: dict[str, Any] = {"properties": {}}
    for path, value in paths.items():
        inner = schema
        for name in path.split("."):
            each = name.removesuffix("[]")
            inner = inner.setdefault("properties", {}).setdefault(each, {})
            if name != each:
                inner = inner.setdefault("items", {})
        inner |= leaf(value)
    return schema


# The classes.


PartT = TypeVar("PartT")


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def part(kind: type[PartT]) -> type[PartT]:
    """A frozen dataclass whose members pydantic checks; BundleError names the one that is wrong."""
    config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
    made: Any = checked_dataclasses.dataclass(frozen=True, slots=True, config=config)(kind)
    fill = made.__init__

    @wraps(fill)
    def checked(self: object, *values: object, **named: object) -> None:
        try:
            fill(self, *values, **named)
        except ValidationError as error:
            raise explained(error, made) from None

    made.__init__ = checked
    return cast(type[PartT], made)


@part
class Part:
    """An object of a bundle's JSON files."""

    OPTIONAL: ClassVar[frozenset[str]] = frozenset()  # that bundles of earlier releases lack
    ASCENDING: ClassVar[tuple[str, ...]] = ()  # members of which none is above the next
    RULES: ClassVar[tuple[Rule, ...]] = ()

    def check(self) -> None:
        """What `RULES` cannot say; BundleError where it is broken."""

    def check_read(self) -> None:
        """What holds of JSON, but not yet of an object that is being made."""

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The object that JSON holds; refuses anything it does not know."""
        kind: Any = cls
        try:
            made: Self = _adapter(kind).validate_python(value)
        except ValidationError as error:
            raise explained(error, cls) from None
        made.check_read()
        return made

    def to_json(self) -> dict[str, Any]:
        """The object as the value of its JSON."""
        value: dict[str, Any] = plain(self)
        return {name: value[name] for name in sorted(value, key="schema_version".__ne__)}

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        """JSON has exactly the members of the class, those with a default too."""
        if not isinstance(value, dict):
            return value  # no JSON, or refused as no object
        known = _members(cls)
        if "schema_version" in known and "schema_version" in value:
            # First: a later schema has other keys, and its number explains them best.
            check_version(value["schema_version"], known["schema_version"])
        for name in known:
            if name not in value and name not in cls.OPTIONAL:
                raise BundleError("is missing; export the bundle again", field=name)
        for key in value:
            if key not in known:
                raise BundleError(
                    f"is not a known key; the keys here are {', '.join(known)}: remove it, or "
                    "serve the bundle with the release that wrote it",
                    field=_path((key,)),
                )
        return {key: item for key, item in value.items() if key in known}

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for name, above in itertools.pairwise(self.ASCENDING):
            low, high = getattr(self, name), getattr(self, above)
            if None not in (low, high) and low > high:
                raise BundleError(
                    f"is {shown(low)}, above {above} ({shown(high)}); export the bundle again",
                    field=name,
                )
        for rule in self.RULES:
            rule.check(self)
        self.check()
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        known = _members(cls)
        schema["required"] = [name for name in known if name not in cls.OPTIONAL]
        optional = {name: known[name] for name in cls.OPTIONAL}
        if cls.RULES:
            schema["allOf"] = [rule.schema(optional) for rule in cls.RULES]
        return schema


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _members(kind: type) -> dict[str, Any]:
    """The members of a class, with their defaults."""
    return {field.name: field.default for field in fields(kind)}


def check_version(value: object, known: int) -> None:
    """Refuse a schema version that this release does not know."""
    if type(value) is not int or value != known:
        raise BundleError(
            f"is {shown(value)}, but this release reads version {known}: use the release "
            "that wrote the bundle, or export it again with this one",
            field="schema_version",
        )


def check_name(name: object) -> None:
    """BundleError unless a model can have this name."""
    try:
        _adapter(Name).validate_python(name)
    except ValidationError as error:
        raise BundleError(_problem(error.errors()[0]), field="name") from None


# What pydantic found, in plain words.


def explained(error: ValidationError, kind: type) -> BundleError:
    """The first thing that is wrong with an object of this class."""
    found = error.errors(include_url=False)[0]
    what, loc, context = found["type"], found["loc"], found.get("ctx", {})
    if loc and isinstance(loc[0], int):  # given by its position
        loc = (list(_members(kind))[loc[0]], *loc[1:])
    if loc[-1:] == ("[key]",):
        loc = loc[:-2]
    if loc[:1] == ("input",):  # then its kind
        loc = ("input", *loc[2:], *(("kind",) if what.startswith("union_tag") else ()))
    field, cause = _path(loc), context.get("error")
    if isinstance(cause, BundleError):
        dot = "." if field and cause.field and not cause.field.startswith("[") else ""
        return BundleError(cause.problem, field=f"{field}{dot}{cause.field}")
    return BundleError(_problem(found), field=field)


def _problem(found: ErrorDetails) -> str:
    what, value, context = found["type"], found["input"], found.get("ctx", {})
    words = re.sub(r"^\w+ should ", "must ", found["msg"]).replace(" after validation", "")
    words = words.replace("greater than or equal to", "at least")
    words = words.replace("less than or equal to", "at most")
    words = words.replace("a valid integer", "an integer").replace("a valid ", "a ")
    if what in ("missing", "union_tag_not_found"):
        return "is missing; export the bundle again"
    if what == "string_pattern_mismatch":
        return f"is {shown(value)}{_PATTERNS[context['pattern']]}"
    if what == "string_unicode":
        return "holds half a surrogate pair, which is no text"
    if what == "union_tag_invalid":
        words, value = f"must be one of {context['expected_tags']}", context["tag"]
    elif what == "tuple_type":
        words = "must be a list"
    elif what in ("dataclass_type", "mapping_type", "dict_type", "model_attributes_type"):
        words = "must be an object"
    elif what == "float_type" and type(value) is int:
        words = "must be a number that is not too large"
    return words if ", not " in words else f"{words}, not {shown(value)}"


def _path(loc: Sequence[int | str]) -> str:
    """A member by its path, such as `rungs[2].quality.value`; short, whatever the keys are."""
    return "".join(map(_step, loc)).removeprefix(".")


def _step(part: int | str) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if part.isidentifier() and len(part) <= 60 else f"[{shown(part)}]"
