"""Recipe files: TOML read into the settings; unknown keys and wrong types fail at once.

Knows how settings are written, not what they mean.
"""

import copy
import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from train.config import Recipe, RecipeError

RECIPES = Path(__file__).parent / "recipes"
# What has characters as tokens unless it says otherwise.
_READ_BY_CHARACTER = ("text", "stdlib", "logic")
_MADE = ("parity", "listops", "logic", "stdlib")  # data that is made on the spot


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(source: str, overrides: list[str] | None = None, data: str = "") -> Recipe:
    """A recipe by name or path, with `key=value` overrides and the data path applied."""
    path = Path(source) if source.endswith(".toml") else RECIPES / f"{source}.toml"
    if not path.is_file():
        raise RecipeError(
            f"no recipe {source!r}: give the path of a .toml file or one of "
            f"{', '.join(recipe_names())}"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    recipe = overridden(table, overrides or [], str(path))
    return data_at(recipe, data or recipe.data.path)


def data_at(recipe: Recipe, path: str) -> Recipe:
    """The recipe with its data at a path, if one is given; refuses what would not be read."""
    if not path:
        return recipe
    if recipe.data.kind in _MADE:
        raise RecipeError(
            f'{recipe.name} makes its own data (data.kind is "{recipe.data.kind}") and would not '
            f"read {path}: leave that out; `stepdial train text` and `stepdial train classifier` "
            "take data of your own"
        )
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=path))


def overridden(table: dict[str, Any], overrides: list[str], where: str) -> Recipe:
    """The recipe of a table with `key=value` overrides; a fault of theirs names those at fault."""
    changed = _with(table, overrides)
    try:
        return recipe_from(changed, where)
    except RecipeError as error:
        if not overrides or not _loads(table):
            raise
        others = {one: [other for other in overrides if other != one] for one in overrides}
        guilty = [one for one in others if _loads(table, others[one])]
        named = ", ".join(f"--set {one!r}" for one in guilty or overrides)
        raise RecipeError(f"{named}: {str(error).removeprefix(f'{where}: ')}") from None


def _with(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    changed = copy.deepcopy(table)
    for one in overrides:
        apply_override(changed, one)
    return changed


def _loads(table: dict[str, Any], overrides: Sequence[str] = ()) -> bool:
    try:
        recipe_from(_with(table, overrides), "")
    except RecipeError:
        return False
    return True


def recipe_from(table: dict[str, Any], where: str) -> Recipe:
    recipe = _build(Recipe, table, where, "")
    assert isinstance(recipe, Recipe)
    if recipe.data.kind == "pairs" and table["data"].get("tokenizer", "bpe") != "bpe":
        raise RecipeError(f'{where}: data.tokenizer must be "bpe" for pairs of texts')
    if "tokenizer" in table["data"] or recipe.data.kind in _READ_BY_CHARACTER:
        return recipe
    data = dataclasses.replace(recipe.data, tokenizer="bpe")
    return dataclasses.replace(recipe, data=data)


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in a recipe's table."""
    key, equals, text = override.partition("=")
    if not equals:
        raise RecipeError(f"--set {override!r}: write it as key=value, e.g. optim.lr=0.001")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {override!r}: {parent} is a value, not a section")
    table[last] = value


def _build(cls: Any, table: Any, where: str, prefix: str) -> Any:
    if not isinstance(table, dict):
        raise RecipeError(f"{where}: {prefix.rstrip('.') or 'the recipe'} must be a section")
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    for key in table:
        if key not in names:
            known = ", ".join(sorted(names))
            raise RecipeError(f"{where}: unknown key {prefix + key!r}; known here: {known}")
    values = {}
    for key, value in table.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(hint, value, where, f"{prefix}{key}.")
        else:
            values[key] = _coerce(hint, value, f"{where}: {prefix}{key}")
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RecipeError(f"{where}: missing {', '.join(prefix + m for m in missing)}")
    return cls(**values)


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint):
            options = ", ".join(map(str, typing.get_args(hint)))
            raise RecipeError(f"{where} must be one of {options}, not {value!r}")
        return value
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, str) and inner is not str:
            raise RecipeError(f"{where} must be a list like [1, 2], not {value!r}")
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce(inner, item, where) for item in items)
    if origin in (dict, types.GenericAlias) and isinstance(value, dict):
        return value
    if hint is str and type(value) is int:
        return str(value)  # a column or a class may be a number
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{where} must be a finite number, not {value}")
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise RecipeError(f"{where} must be {expected.__name__}, not {value!r}")
    return value
