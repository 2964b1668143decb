"""Recipes: small TOML files read into frozen dataclasses; unknown keys and wrong types fail.

Knows the settings and their limits, not what they do.
"""

import dataclasses
import json
import re
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RECIPES = Path(__file__).parent / "recipes"


class RecipeError(ValueError):
    """A recipe that cannot be used, with the key and what to change."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where examples come from: `text` corpora, `table`s of text and label, or a generator."""

    kind: Literal["text", "table", "stdlib", "parity", "listops"]
    path: str = ""  # the corpus file, or the folder of the tables
    tokenizer: Literal["chars", "bpe"] = "chars"
    vocabulary: int = 8192  # size of a BPE vocabulary
    lowercase: bool = False
    held_out: float = 0.1  # share of a corpus or table kept for validation
    train: str = ""  # table files: .csv, .jsonl, also .gz or .xz
    test: str = ""  # official test table, if there is one
    text: tuple[str, ...] = ("text",)  # columns joined by a space; numbers where there is no header
    label: str = "label"
    labels: tuple[str, ...] = ()  # names shown for the classes
    values: tuple[str, ...] = ()  # how the file writes the classes, in the order of `labels`
    head: int = 0  # a long text keeps its first `head` and last `tail` tokens
    tail: int = 0
    longest: int = 0  # generators: longest example
    rows: int = 0  # generators: how many examples


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Literal["decoder", "encoder"]
    depth: Literal["ode", "discrete"] = "ode"
    layers: int = 2
    heads: int = 4
    width: int = 128
    hidden: int = 512
    window: int = 128
    norm: Literal["pre", "post", "none"] = "pre"
    final_norm: Literal["inside", "outside", "none"] = "outside"
    pool: Literal["mean", "max"] = "mean"
    dropout: float = 0.0
    embed_dropout: float = 0.0
    T: float = 1.0


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """How many steps each batch takes in training."""

    method: Literal["euler", "ab2", "midpoint", "heun", "rk4"] = "euler"
    full: int = 8
    schedule: Literal["any", "fixed"] = "any"
    short: tuple[int, ...] = (1, 2, 4)  # the smaller counts that `any` draws from
    full_probability: float = 0.5
    grow: float = 0.5  # share of the training cost spent at one step first; only with `any`


@dataclass(frozen=True, slots=True)
class OptimConfig:
    iterations: int = 1000
    batch: int = 32
    accumulate: int = 1
    lr: float = 1e-3
    final_lr: float = 0.05  # of lr, at the end of the cosine
    warmup: int = 100
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0
    transport: float = 0.1  # lambda, the weight of the transport cost
    smoothing: float = 0.0  # label smoothing
    token_dropout: float = 0.0  # share of input tokens hidden from a classifier
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, slots=True)
class RunConfig:
    seed: int = 0
    evaluate_every: int = 500
    evaluate_batches: int = 20
    checkpoint_every: int = 500
    threads: int = 0  # 0: as many as torch picks


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    data: DataConfig
    model: ModelConfig
    title: str = ""
    card: dict[str, Any] = field(default_factory=dict)  # free facts for the model card
    steps: StepsConfig = field(default_factory=StepsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for sentence, holds in {
            **_data_and_model_rules(self.data, self.model),
            **_training_rules(self.steps, self.optim, self.run),
            "name must be 1 to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first": bool(
                _NAME.fullmatch(self.name)
            ),
        }.items():
            if not holds:
                raise RecipeError(f"recipe {self.name!r}: {sentence}")

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]


def _data_and_model_rules(data: DataConfig, model: ModelConfig) -> dict[str, bool]:
    sizes = (model.layers, model.heads, model.width, model.hidden, model.window)
    made = data.kind in ("parity", "listops")
    text = data.kind in ("text", "stdlib")
    return {
        "model.layers, heads, width, hidden and window must be at least 1": min(sizes) >= 1,
        "model.width must be a multiple of model.heads": model.heads > 0
        and model.width % model.heads == 0,
        "model.T must be above 0": model.T > 0,
        "model.dropout and embed_dropout must be in [0, 1)": 0 <= model.dropout < 1
        and 0 <= model.embed_dropout < 1,
        'model.family must be "decoder" for text and "encoder" for labelled data': text
        == (model.family == "decoder"),
        "data.held_out must be in (0, 1)": 0 < data.held_out < 1,
        "data.longest must be at least 1 and data.rows at least 20": not made
        or (data.longest >= 1 and data.rows >= 20),
        "data.head + data.tail must not exceed model.window": min(data.head, data.tail) >= 0
        and data.head + data.tail <= model.window,
    }


def _training_rules(steps: StepsConfig, optim: OptimConfig, run: RunConfig) -> dict[str, bool]:
    return {
        "steps.full must be at least 1": steps.full >= 1,
        "steps.short must be counts from 1 to steps.full": all(
            1 <= count <= steps.full for count in steps.short
        ),
        "steps.short must not be empty with schedule any": steps.schedule != "any"
        or bool(steps.short),
        "steps.full_probability must be in [0, 1]": 0 <= steps.full_probability <= 1,
        "steps.grow must be in [0, 1)": 0 <= steps.grow < 1,
        "optim.iterations, batch and accumulate must be at least 1": min(
            optim.iterations, optim.batch, optim.accumulate
        )
        >= 1,
        "optim.lr must be above 0": optim.lr > 0,
        "optim.transport must not be negative": optim.transport >= 0,
        "optim.warmup and final_lr must not be negative": min(optim.warmup, optim.final_lr) >= 0,
        "optim.token_dropout and smoothing must be in [0, 1)": 0 <= optim.token_dropout < 1
        and 0 <= optim.smoothing < 1,
        "run.seed must be from 0 to 2147483647": 0 <= run.seed < 2**31,
        "run.checkpoint_every, evaluate_every and evaluate_batches must be at least 1": min(
            run.checkpoint_every, run.evaluate_every, run.evaluate_batches
        )
        >= 1,
    }


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
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    for override in overrides or []:
        _set(table, override)
    if data:
        table.setdefault("data", {})["path"] = data
    return recipe_from(table, str(path))


def recipe_from(table: dict[str, Any], where: str) -> Recipe:
    recipe = _build(Recipe, table, where, "")
    assert isinstance(recipe, Recipe)
    return recipe


def _set(table: dict[str, Any], override: str) -> None:
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
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce(inner, item, where) for item in items)
    if origin in (dict, types.GenericAlias) and isinstance(value, dict):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise RecipeError(f"{where} must be {expected.__name__}, not {value!r}")
    return value
