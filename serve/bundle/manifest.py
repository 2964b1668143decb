"""Every field of a bundle's manifest and latency table, with its rules.

Only the JSON is checked here; serve/bundle/folder.py checks the files.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from dataclasses import field as dataclass_field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, get_args

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
    """A bundle that cannot be used: names the file and field, and what to do."""

    def __init__(self, problem: str, *, field: str = "", file: str = "") -> None:
        self.problem = problem
        self.field = field
        self.file = file
        sentence = f"{field} {problem}" if field else problem
        super().__init__(f"{file}: {sentence}" if file else sentence)


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Prefix the field of a BundleError raised inside with the field that holds it."""
    try:
        yield
    except BundleError as error:
        glue = "." if error.field and not error.field.startswith("[") else ""
        outer = f"{field}{glue}{error.field}"
        raise BundleError(error.problem, field=outer, file=error.file) from None


@contextmanager
def inside_file(path: Path) -> Iterator[None]:
    """Name the file of a BundleError raised inside."""
    try:
        yield
    except BundleError as error:
        file = error.file or str(path)
        raise BundleError(error.problem, field=error.field, file=file) from None


def kind_of(value: object) -> str:
    """The word for a value's JSON type, for messages."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def shown(value: object) -> str:
    """A value for messages: short enough, however large it is."""
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


# A rung: its steps, cost, measured quality and verification. How many evaluations it must spend
# depends on the bundle's depth: see `check_depth`.


Method = Literal["euler", "ab2", "midpoint", "heun", "rk4"]
Effort = Literal["low", "medium", "high", "max"]
Metric = Literal["loss", "accuracy", "bleu"]

EVALUATIONS_PER_STEP: dict[str, int] = {"euler": 1, "ab2": 1, "midpoint": 2, "heun": 2, "rk4": 4}
METHODS = tuple(EVALUATIONS_PER_STEP)
EFFORTS: tuple[Effort, ...] = ("low", "medium", "high", "max")
METRICS = ("loss", "accuracy", "bleu")
MAX_STEPS = 1024
MAX_EVALUATIONS = 1 << 20
_HUGE = 1e30
_RANGES = {"loss": (-_HUGE, _HUGE), "accuracy": (0.0, 1.0), "bleu": (0.0, 100.0)}


def steps_in_words(steps: int) -> str:
    """A count of steps in words."""
    return "1 step" if steps == 1 else f"{steps} steps"


@dataclass(frozen=True, slots=True)
class Quality:
    """A rung's measured quality on held-out data, with its confidence interval."""

    metric: Metric
    value: float
    low: float
    high: float
    samples: int
    exact: float | None = None  # taggers: the share of rows with every position right

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        check_number("value", self.value, *_RANGES[self.metric])
        check_number("low", self.low, -_HUGE, self.value)
        check_number("high", self.high, self.value, _HUGE)
        check_integer("samples", self.samples, 1, 1 << 53)
        if self.exact is not None:
            check_number("exact", self.exact, 0.0, 1.0)

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            value = {"exact": None} | value
        return cls(**check_members(value, ("metric", "value", "low", "high", "samples", "exact")))


@dataclass(frozen=True, slots=True)
class Range:
    """The last rung's quality less the first rung's: mean over the rows, and its interval.

    Above 0 is better, whatever the metric. Both rungs were measured on the same rows, so the
    interval is that of a paired difference.
    """

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        check_number("value", self.value, -_HUGE, _HUGE)
        check_number("low", self.low, -_HUGE, self.value)
        check_number("high", self.high, self.value, _HUGE)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("value", "low", "high")))


@dataclass(frozen=True, slots=True)
class Verified:
    """How far the graph's float32 answer was from the model's, and the tolerance."""

    max_abs_error: float
    tolerance: float
    float32_error: float

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, 0.0, _HUGE)
        check_number("float32_error", self.float32_error, 0.0, _HUGE)
        check_number("max_abs_error", self.max_abs_error, 0.0, _HUGE)
        if self.max_abs_error > self.tolerance:
            raise BundleError(
                f"is {self.max_abs_error:g}, above the tolerance {self.tolerance:g}: this graph "
                "failed its verification; export the bundle again",
                field="max_abs_error",
            )

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("max_abs_error", "tolerance", "float32_error")))


@dataclass(frozen=True, slots=True)
class AgainstFp32:
    """What a lower precision changed, on the rows of the quality measurement."""

    top1_agreement: float  # share of answers equal to float32's
    change: float  # of the metric: its value less float32's
    samples: int

    def __post_init__(self) -> None:
        check_number("top1_agreement", self.top1_agreement, 0.0, 1.0)
        check_number("change", self.change, -_HUGE, _HUGE)
        check_integer("samples", self.samples, 1, 1 << 53)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("top1_agreement", "change", "samples")))


@dataclass(frozen=True, slots=True)
class Rung:
    """One operating point: a method with a number of steps, as one fixed-step graph."""

    steps: int
    method: Method
    nfe: int
    effort: Effort | None
    graph: str
    quality: Quality
    verified: Verified
    encoder: str | None = None  # translators: the graph that reads the source
    dominated: bool = False  # fewer steps are at least as good
    against_fp32: AgainstFp32 | None = None  # in a lower precision

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, MAX_STEPS)
        check_choice("method", self.method, METHODS)
        if self.effort is not None:
            check_choice("effort", self.effort, EFFORTS)
        check_file_name("graph", self.graph)
        check_integer("nfe", self.nfe, 1, MAX_EVALUATIONS)
        if self.encoder is not None:
            check_file_name("encoder", self.encoder)
        check_flag("dominated", self.dominated)
        if self.dominated and self.effort is not None:
            raise BundleError(
                f"is {self.effort}, but fewer steps are at least as good: name those",
                field="effort",
            )

    @property
    def spent(self) -> int:
        """Evaluations of a velocity that is integrated in these steps."""
        return self.steps * EVALUATIONS_PER_STEP[self.method]

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs of the rung, by field."""
        graphs = {"graph": self.graph}
        return graphs if self.encoder is None else graphs | {"encoder": self.encoder}

    @classmethod
    def from_json(cls, value: object) -> Self:
        members = dict(check_members(value, _KEYS))
        with inside("quality"):
            members["quality"] = Quality.from_json(members["quality"])
        with inside("verified"):
            members["verified"] = Verified.from_json(members["verified"])
        with inside("against_fp32"):
            if members["against_fp32"] is not None:
                members["against_fp32"] = AgainstFp32.from_json(members["against_fp32"])
        return cls(**members)


_KEYS = (
    "steps",
    "method",
    "nfe",
    "effort",
    "dominated",
    "graph",
    "encoder",
    "quality",
    "verified",
    "against_fp32",
)


def check_ladder(rungs: tuple[Rung, ...], method: str) -> None:
    """Rules between the rungs of one bundle."""
    if not rungs:
        raise BundleError("is empty; a bundle has at least one rung: export it again")
    for index, rung in enumerate(rungs):
        here = f"[{index}]"
        if rung.method != method:
            raise BundleError(
                f"is {rung.method}, but the bundle's method is {method}: a bundle has one method",
                field=f"{here}.method",
            )
        if rung.quality.metric != rungs[0].quality.metric:
            raise BundleError(
                f"is {rung.quality.metric}, but the first rung's is {rungs[0].quality.metric}: "
                "a ladder has one metric",
                field=f"{here}.quality.metric",
            )
        if index and rung.steps == rungs[index - 1].steps:
            raise BundleError(
                f"repeats {rung.steps}; keep one rung of each step count", field=f"{here}.steps"
            )
        if index and rung.steps < rungs[index - 1].steps:
            raise BundleError(
                f"is {rung.steps} after {rungs[index - 1].steps}; sort the rungs by steps",
                field=f"{here}.steps",
            )
    seen: set[str] = set()
    for index, rung in enumerate(rungs):
        for field, graph in rung.graphs.items():
            if graph in seen:
                raise BundleError(
                    f"repeats {graph}; every rung has graphs of its own", field=f"[{index}].{field}"
                )
            seen.add(graph)
    _check_efforts(rungs)


def _check_efforts(rungs: tuple[Rung, ...]) -> None:
    last = -1
    for index, rung in enumerate(rungs):
        if rung.effort is None:
            continue
        field = f"[{index}].effort"
        rank = EFFORTS.index(rung.effort)
        if rank == last:
            raise BundleError(f"repeats {rung.effort}; each word names one rung", field=field)
        if rank < last:
            raise BundleError(
                f"is {rung.effort} after {EFFORTS[last]}; a greater effort has more steps",
                field=field,
            )
        last = rank


TokenizerKind = Literal["chars", "bpe", "words", "wordpiece", "unigram"]
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """Where the tokenizer is, and the facts that the graphs rely on."""

    kind: TokenizerKind
    file: str
    pad_id: int
    vocab_size: int
    bos_id: int | None = None  # begins every answer of a translator
    eos_id: int | None = None  # ends it; of a generator, any answer
    chat_template: str | None = None  # the file that turns messages into a prompt

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(TokenizerKind))
        check_file_name("file", self.file)
        if self.chat_template is not None:
            check_file_name("chat_template", self.chat_template)
        check_integer("vocab_size", self.vocab_size, 1, 1 << 24)
        check_integer("pad_id", self.pad_id, 0, self.vocab_size - 1)
        taken = {self.pad_id: "pad_id"}
        for field, token in (("bos_id", self.bos_id), ("eos_id", self.eos_id)):
            if token is None:
                continue
            check_integer(field, token, 0, self.vocab_size - 1)
            if token in taken:
                raise BundleError(
                    f"is {token}, like {taken[token]}; each needs a token of its own", field=field
                )
            taken[token] = field

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that no text is encoded to."""
        ids = (self.pad_id, self.bos_id, self.eos_id)
        return tuple(token for token in ids if token is not None)

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            value = {"chat_template": None} | value
        keys = ("kind", "file", "pad_id", "vocab_size", "bos_id", "eos_id", "chat_template")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one velocity; a decoder's caches follow from it."""

    layers: int
    heads: int
    head_width: int
    width: int
    parameters: int
    state: int | None = None  # width of a decoder's state between steps, where it is larger

    def __post_init__(self) -> None:
        check_integer("layers", self.layers, 1, 1024)
        check_integer("heads", self.heads, 1, 1024)
        check_integer("head_width", self.head_width, 1, 4096)
        check_integer("width", self.width, 1, 1 << 16)
        check_integer("parameters", self.parameters, 1, 10**12)
        if self.state is not None:
            check_integer("state", self.state, self.width, 1 << 17)

    @property
    def state_width(self) -> int:
        """The width of a decoder's state between steps, which may hold more than x."""
        return self.width if self.state is None else self.state

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            value = {"state": None} | value
        keys = ("layers", "heads", "head_width", "width", "parameters", "state")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The graphs of one step: embedding, step, and head."""

    embed: str
    step: str
    head: str

    def __post_init__(self) -> None:
        for field, file in self.graphs.items():
            check_file_name(field, file)

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs by field."""
        return {"embed": self.embed, "step": self.step, "head": self.head}

    @classmethod
    def from_json(cls, value: object) -> Self:
        if isinstance(value, dict):
            # Earlier releases named a graph for rows of several rungs, which is no longer used.
            value = {key: item for key, item in value.items() if key not in ("mixed", "groups")}
        return cls(**check_members(value, ("embed", "step", "head")))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size and hash of a file."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.sha256, str) or _SHA256.fullmatch(self.sha256) is None:
            raise BundleError("must be 64 lower-case hexadecimal digits", field="sha256")
        check_integer("bytes", self.bytes, 0, 1 << 40)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("sha256", "bytes")))


MAX_TOKENS = 1 << 20
MAX_CHANNELS = 4
MAX_SIDE = 4096
MAX_POINTS = 1 << 16
MAX_DIMENSIONS = 16
INPUT_KINDS = ("text", "image", "points")
_INPUTS_HUGE = 1e6


@dataclass(frozen=True, slots=True)
class Truncation:
    """Of a text that is too long, keep the first `head` and the last `tail` tokens."""

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
    """Tokens; for a translator, those of the source."""

    kind: Literal["text"] = "text"
    max_tokens: int
    truncation: Truncation | None = None
    exact: bool = False  # every text has max_tokens tokens, no more and no fewer

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("text",))
        check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_flag("exact", self.exact)
        if self.exact and self.truncation is not None:
            raise BundleError("must be null where exact is true", field="truncation")
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
        if isinstance(value, dict):
            value = {"exact": False} | value
        members = dict(check_members(value, ("kind", "max_tokens", "truncation", "exact")))
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
        for field, values, low in (("mean", self.mean, -_INPUTS_HUGE), ("std", self.std, 1e-6)):
            if len(values) != self.channels:
                raise BundleError(
                    f"has {len(values)} numbers for {self.channels} channels; give one each",
                    field=field,
                )
            for index, value in enumerate(values):
                check_number(f"{field}[{index}]", value, low, _INPUTS_HUGE)

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


Task = Literal["generate", "classify", "translate", "tag"]
Depth = Literal["ode", "fixed", "chain"]
Cache = Literal["kv", "kv_fp16", "kv_int8", "none"]  # of 32, 16 or 8 bits, or no caches
# How rungs relate: each M crosses [0, T] in steps of T / M, or all follow one grid and stop at M.
Dial = Literal["resolution", "time"]

TASKS = ("generate", "classify", "translate", "tag")
LABELLING: tuple[Task, ...] = ("classify", "tag")  # one label a row, or one a position
DEPTHS = ("ode", "fixed", "chain")
CACHES = ("kv", "kv_fp16", "kv_int8", "none")
_CACHE_BITS = {"kv_fp16": 16, "kv_int8": 8}  # of those that are rounded
DIALS = ("resolution", "time")
MAX_LABELS = 100_000


def check_task(manifest: "Manifest") -> None:
    """Rules that follow from the task, for labels, input, tokenizer, cache and graphs."""
    task, spec = manifest.task, manifest.input
    if task in LABELLING:
        _check_labels(task, manifest.labels)
        if task == "tag" and not isinstance(spec, TextInput):
            raise BundleError("must be text for the task tag", field="input.kind")
    else:
        if manifest.labels is not None:
            raise BundleError(f"must be null for the task {task}", field="labels")
        if not isinstance(spec, TextInput):
            raise BundleError(f"must be text for the task {task}", field="input.kind")
        if spec.truncation is not None:
            raise BundleError(f"must be null for the task {task}", field="input.truncation")
        if spec.exact:
            raise BundleError(f"must be false for the task {task}", field="input.exact")
    if manifest.keeps_caches and task != "generate":
        raise BundleError(f"must be none for the task {task}", field="cache")
    _check_tokenizer(manifest)
    _check_translation(manifest)
    _check_step(manifest)
    if manifest.shape.state is not None and not manifest.keeps_caches:
        raise BundleError("must be null for the cache none", field="shape.state")
    if manifest.embedding is not None:
        if task != "classify" or not isinstance(spec, TextInput):
            raise BundleError(
                f"must be null for the task {task} and the input {spec.kind}", field="embedding"
            )
        check_integer("embedding", manifest.embedding, 1, 1 << 16)
    if manifest.range is not None and len(manifest.rungs) == 1:
        raise BundleError("must be null for one rung", field="range")
    for index, rung in enumerate(manifest.rungs):
        if (rung.against_fp32 is None) == manifest.rounds:
            raise BundleError(
                f"must be {'an object' if manifest.rounds else 'null'} for the precision "
                f"{manifest.precision} and the cache {manifest.cache}",
                field=f"rungs[{index}].against_fp32",
            )


def check_depth(manifest: "Manifest") -> None:
    """Rules that follow from the depth, for the ladder and each rung's evaluations."""
    depth = manifest.depth
    if depth == "fixed":
        if manifest.method != "euler":
            raise BundleError(
                f"must be euler for the depth fixed, not {manifest.method}", field="method"
            )
        if manifest.steps != (1,):
            raise BundleError(
                "must be one rung of 1 step for the depth fixed: the weights differ by depth",
                field="rungs",
            )
    if depth == "chain" and manifest.keeps_caches:
        raise BundleError("must be none for the depth chain", field="cache")
    stacks = 2 if manifest.task == "translate" else 1
    for index, rung in enumerate(manifest.rungs):
        spent = stacks * rung.spent
        if depth == "chain":
            right = rung.nfe % rung.spent == 0
            wanted = f"a multiple of {rung.spent}"
        else:
            right, wanted = rung.nfe == spent, str(spent)
        if not right:
            raise BundleError(
                f"is {rung.nfe}, but must be {wanted} for {steps_in_words(rung.steps)} of "
                f"{rung.method}; export the bundle again",
                field=f"rungs[{index}].nfe",
            )


def check_dial(manifest: "Manifest") -> None:
    """Rules that follow from the dial: a dial of time has a grid and can stop at any step."""
    if manifest.dial == "resolution":
        if manifest.grid_steps is not None:
            raise BundleError("must be null for the dial resolution", field="grid_steps")
        return
    check_integer("grid_steps", manifest.grid_steps, 1, MAX_STEPS)
    if manifest.depth != "ode":
        raise BundleError(
            f"must be resolution for the depth {manifest.depth}: there is no one clock to stop",
            field="dial",
        )


def _check_step(manifest: "Manifest") -> None:
    """An integrated velocity has graphs of one step; so does any model with caches."""
    integrated = manifest.depth == "ode" and manifest.task != "translate"
    wanted = integrated or manifest.keeps_caches
    if wanted != (manifest.step is not None):
        raise BundleError(
            f"must be {'an object' if wanted else 'null'} for the task {manifest.task}, the depth "
            f"{manifest.depth} and the cache {manifest.cache}",
            field="step",
        )
    stops = manifest.task in LABELLING and wanted and manifest.method == "euler"
    if manifest.calibration is not None and not stops:
        raise BundleError(
            f"must be null for the task {manifest.task}, the depth {manifest.depth} and the method "
            f"{manifest.method}",
            field="calibration",
        )


def _check_labels(task: Task, labels: tuple[str, ...] | None) -> None:
    if labels is None:
        raise BundleError(f"must be a list for the task {task}, not null", field="labels")
    if not 2 <= len(labels) <= MAX_LABELS:
        raise BundleError(
            f"has {len(labels)} labels; a classifier has from 2 to {MAX_LABELS}", field="labels"
        )
    seen: set[str] = set()
    for index, label in enumerate(labels):
        check_text(f"labels[{index}]", label, 1000)
        if label in seen:
            raise BundleError(
                f"repeats {label!r}; every class has a label of its own", field=f"labels[{index}]"
            )
        seen.add(label)


def _check_tokenizer(manifest: "Manifest") -> None:
    kind, tokenizer = manifest.input.kind, manifest.tokenizer
    if kind != "text":
        if tokenizer is not None:
            raise BundleError(f"must be null for the input {kind}", field="tokenizer")
        return
    if tokenizer is None:
        raise BundleError("must be an object for the input text, not null", field="tokenizer")
    if tokenizer.chat_template is not None and manifest.task != "generate":
        raise BundleError(
            f"must be null for the task {manifest.task}", field="tokenizer.chat_template"
        )
    for field, token in (("bos_id", tokenizer.bos_id), ("eos_id", tokenizer.eos_id)):
        if manifest.task == "translate" and token is None:
            raise BundleError(
                "must be an integer for the task translate, not null", field=f"tokenizer.{field}"
            )
        ends = manifest.task == "generate" and field == "eos_id"  # where its texts end
        if manifest.task != "translate" and token is not None and not ends:
            raise BundleError(
                f"must be null for the task {manifest.task}", field=f"tokenizer.{field}"
            )


def _check_translation(manifest: "Manifest") -> None:
    translates = manifest.task == "translate"
    if translates:
        check_integer("target_max_tokens", manifest.target_max_tokens, 2, MAX_TOKENS)
    elif manifest.target_max_tokens is not None:
        raise BundleError(f"must be null for the task {manifest.task}", field="target_max_tokens")
    for index, rung in enumerate(manifest.rungs):
        if translates and rung.encoder is None:
            raise BundleError(
                "must be a file name for the task translate, not null",
                field=f"rungs[{index}].encoder",
            )
        if not translates and rung.encoder is not None:
            raise BundleError(
                f"must be null for the task {manifest.task}", field=f"rungs[{index}].encoder"
            )
        if manifest.task != "tag" and rung.quality.exact is not None:
            raise BundleError(
                f"must be null for the task {manifest.task}",
                field=f"rungs[{index}].quality.exact",
            )
        if not translates and rung.quality.metric == "bleu":
            raise BundleError(
                f"is bleu, which measures translations, not the task {manifest.task}",
                field=f"rungs[{index}].quality.metric",
            )


# Calibration of early answers. After each evaluation but the last, the jump to the end gives
# logits. A row stops there if the margin of its largest logit reaches the threshold; otherwise it
# gets the full-step answer. What a level guarantees, with the given confidence over the draw of the
# calibration rows: on data like them, the share of answers that differ from the full-step answer is
# at most `max_disagreement`. Each level holds on its own. A request between two levels uses the
# stricter one; a request below the strictest, or a level without a threshold, runs all steps.


MAX_LEVELS = 16
_LEAST, _MOST = 1e-9, 1 - 1e-9  # shares that are neither 0 nor 1
_MAX_THRESHOLD = 1e30


@dataclass(frozen=True, slots=True)
class Level:
    """An allowed disagreement, and the margin that an early answer needs to keep it."""

    max_disagreement: float
    threshold: float | None  # None: none could be certified, so run all steps
    evaluations: float  # mean per calibration row
    observed: float  # share of the calibration rows whose answer differed

    def __post_init__(self) -> None:
        check_number("max_disagreement", self.max_disagreement, _LEAST, _MOST)
        if self.threshold is not None:
            check_number("threshold", self.threshold, 0.0, _MAX_THRESHOLD)
        check_number("evaluations", self.evaluations, 1.0, MAX_EVALUATIONS)
        check_number("observed", self.observed, 0.0, 1.0)
        if self.observed > self.max_disagreement:
            raise BundleError(
                f"is {self.observed:g}, above the {self.max_disagreement:g} that the level allows: "
                "export the bundle again",
                field="observed",
            )

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("max_disagreement", "threshold", "evaluations", "observed")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class Calibration:
    """The levels certified on these rows, from the strictest to the loosest."""

    rows: int
    confidence: float
    source: str
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, 1, 1 << 53)
        check_number("confidence", self.confidence, _LEAST, _MOST)
        check_text("source", self.source, 1000)
        if not 1 <= len(self.levels) <= MAX_LEVELS:
            raise BundleError(
                f"has {len(self.levels)} items; a calibration has from 1 to {MAX_LEVELS}",
                field="levels",
            )
        for index, (strict, loose) in enumerate(itertools.pairwise(self.levels), start=1):
            field = f"levels[{index}]"
            if loose.max_disagreement <= strict.max_disagreement:
                raise BundleError(
                    f"is {loose.max_disagreement:g} after {strict.max_disagreement:g}; sort the "
                    "levels from strict to loose, each once",
                    field=f"{field}.max_disagreement",
                )
            if _needed(loose) > _needed(strict):
                raise BundleError(
                    "asks more than the stricter level before it; what that one certifies holds "
                    "here too",
                    field=f"{field}.threshold",
                )

    @classmethod
    def from_json(cls, value: object) -> Self:
        members = dict(check_members(value, ("rows", "confidence", "source", "levels")))
        levels = []
        for index, level in enumerate(check_list("levels", members["levels"], MAX_LEVELS)):
            with inside(f"levels[{index}]"):
                levels.append(Level.from_json(level))
        return cls(**(members | {"levels": tuple(levels)}))


def _needed(level: Level) -> float:
    return math.inf if level.threshold is None else level.threshold


SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
LATENCY_FILE = "latency.json"
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
MAX_RUNGS = 64
MAX_FILES = 1024
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

Precision = Literal["fp32", "fp16", "bf16", "int8"]


def rounds(precision: Precision, cache: Cache) -> bool:
    """Whether weights or caches have a lower precision than in training."""
    return precision != "fp32" or cache in _CACHE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a server needs to know of a model before it opens a graph.

    `files` is empty until the bundle is sealed; a manifest that was read lists every file.
    """

    name: str
    task: Task
    precision: Precision = "fp32"
    method: Method
    T: float
    full_steps: int
    default_steps: int
    dial: Dial = "resolution"
    grid_steps: int | None = None  # dial of time: steps that cross [0, T]
    depth: Depth = "ode"
    cache: Cache
    input: InputSpec
    target_max_tokens: int | None = None  # translators: the longest answer
    labels: tuple[str, ...] | None
    tokenizer: TokenizerSpec | None
    shape: Shape
    weights: str
    rungs: tuple[Rung, ...]
    range: Range | None = None  # of its quality, if measured
    step: StepFiles | None = None  # graphs of one step, which can run any rung
    embedding: int | None = None  # numbers in the embedding of a text, if the graphs give one
    calibration: Calibration | None = None  # of early answers
    card: Mapping[str, object] = dataclass_field(default_factory=dict)
    provenance: Mapping[str, object] = dataclass_field(default_factory=dict)
    files: Mapping[str, FileEntry] = dataclass_field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_version(self.schema_version, SCHEMA_VERSION)
        check_name(self.name)
        check_choice("task", self.task, TASKS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("method", self.method, METHODS)
        check_choice("dial", self.dial, DIALS)
        check_choice("depth", self.depth, DEPTHS)
        check_choice("cache", self.cache, CACHES)
        check_number("T", self.T, 1e-6, 1e6)
        check_file_name("weights", self.weights)
        check_facts("card", self.card)
        check_facts("provenance", self.provenance)
        with inside("rungs"):
            check_ladder(self.rungs, self.method)
        check_depth(self)
        check_dial(self)
        self._check_steps()
        check_task(self)
        self._check_names()

    @property
    def steps(self) -> tuple[int, ...]:
        """The step counts of the ladder, ascending."""
        return tuple([rung.steps for rung in self.rungs])

    def step_size(self, steps: int) -> float:
        """The h of each of this many steps: that of the grid, or T over the steps."""
        return self.T / (self.grid_steps or steps)

    @property
    def labelled(self) -> bool:
        """Whether it answers with labels, of a row or of each position."""
        return self.task in LABELLING

    @property
    def fills(self) -> bool:
        """Whether its labels are characters, one for each of the text: a puzzle filled in."""
        if self.task != "tag" or self.text_tokenizer.kind != "chars":
            return False
        return all(len(label) == 1 for label in self.labels or ())

    @property
    def keeps_caches(self) -> bool:
        """Whether the graphs of one step keep keys and values."""
        return self.cache != "none"

    @property
    def rounds(self) -> bool:
        """Whether weights or caches have a lower precision than in training."""
        return rounds(self.precision, self.cache)

    @property
    def precision_in_words(self) -> str:
        """The precision for people, with that of the caches if it differs."""
        bits = _CACHE_BITS.get(self.cache)
        return f"{self.precision}, {bits}-bit caches" if bits else self.precision

    @property
    def text_input(self) -> TextInput:
        """The input of a model that takes text."""
        assert isinstance(self.input, TextInput), f"{self.name} takes no text"
        return self.input

    @property
    def text_tokenizer(self) -> TokenizerSpec:
        """The tokenizer of a model that takes text."""
        assert self.tokenizer is not None, f"{self.name} takes no text"
        return self.tokenizer

    def rung(self, steps: int) -> Rung:
        """The rung of this many steps."""
        for rung in self.rungs:
            if rung.steps == steps:
                return rung
        raise BundleError(
            f"{self.name} has no rung of {steps_in_words(steps)}; it has {self._ladder()}"
        )

    def to_json(self) -> dict[str, Any]:
        """The manifest as the value of manifest.json."""
        value: dict[str, Any] = plain(self)
        return {"schema_version": value.pop("schema_version"), **value}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The manifest in a manifest.json; refuses anything it does not know."""
        if isinstance(value, dict) and "schema_version" in value:
            # First: a later schema has other keys, and its number explains them best.
            check_version(value["schema_version"], SCHEMA_VERSION)
        if isinstance(value, dict):
            # Bundles of earlier releases have the dial of resolution and do not say so.
            absent = {"dial": "resolution", "grid_steps": None, "range": None, "embedding": None}
            value = absent | value
        members = dict(check_members(value, _MANIFEST_KEYS))
        with inside("input"):
            members["input"] = read_input(members["input"])
        with inside("tokenizer"):
            if members["tokenizer"] is not None:
                members["tokenizer"] = TokenizerSpec.from_json(members["tokenizer"])
        with inside("shape"):
            members["shape"] = Shape.from_json(members["shape"])
        with inside("range"):
            if members["range"] is not None:
                members["range"] = Range.from_json(members["range"])
        with inside("step"):
            if members["step"] is not None:
                members["step"] = StepFiles.from_json(members["step"])
        with inside("calibration"):
            if members["calibration"] is not None:
                members["calibration"] = Calibration.from_json(members["calibration"])
        if members["labels"] is not None:
            members["labels"] = tuple(check_list("labels", members["labels"], MAX_LABELS))
        rungs = []
        for index, rung in enumerate(check_list("rungs", members["rungs"], MAX_RUNGS)):
            with inside(f"rungs[{index}]"):
                rungs.append(Rung.from_json(rung))
        members["rungs"] = tuple(rungs)
        members["files"] = _read_files(members["files"])
        manifest = cls(**members)
        manifest.check_files()
        return manifest

    def check_files(self) -> None:
        """Every file that the manifest names has its entry, as in a sealed bundle."""
        for name in self._uses().values():
            if name not in self.files:
                raise BundleError(
                    f"does not list {name}, which the manifest uses; export the bundle again",
                    field="files",
                )

    def _ladder(self) -> str:
        return ", ".join(map(str, self.steps))

    def _check_steps(self) -> None:
        check_integer("full_steps", self.full_steps, 1, 1 << 30)
        check_integer("default_steps", self.default_steps, 1, 1 << 30)
        if self.full_steps != self.steps[-1]:
            raise BundleError(
                f"is {self.full_steps}, but the largest rung has {steps_in_words(self.steps[-1])}",
                field="full_steps",
            )
        if self.default_steps not in self.steps:
            raise BundleError(
                f"is {self.default_steps}, which is no rung; the rungs are {self._ladder()}",
                field="default_steps",
            )

    def _uses(self) -> dict[str, str]:
        """The files that the manifest names, by field."""
        uses = {"weights": self.weights}
        if self.tokenizer is not None:
            uses["tokenizer.file"] = self.tokenizer.file
            if self.tokenizer.chat_template is not None:
                uses["tokenizer.chat_template"] = self.tokenizer.chat_template
        if self.step is not None:
            uses |= {f"step.{field}": graph for field, graph in self.step.graphs.items()}
        for index, rung in enumerate(self.rungs):
            uses |= {f"rungs[{index}].{field}": graph for field, graph in rung.graphs.items()}
        return uses

    def _check_names(self) -> None:
        used = {MANIFEST_FILE: "the manifest", LATENCY_FILE: "the latency table"}
        for where, name in self._uses().items():
            if name in used:
                raise BundleError(
                    f"is {name}, which is {used[name]} already; give each file its own name",
                    field=where,
                )
            used[name] = where
        for name in self.files:
            check_file_name("files", name)
            if name in (MANIFEST_FILE, LATENCY_FILE):
                raise BundleError(
                    f"lists {name}, which is never hashed; remove that entry", field="files"
                )


def check_version(value: object, known: int) -> None:
    """Refuse a schema version that this release does not know."""
    if type(value) is not int or value != known:
        raise BundleError(
            f"is {shown(value)}, but this release reads version {known}: use the release "
            "that wrote the bundle, or export it again with this one",
            field="schema_version",
        )


def _read_files(value: object) -> dict[str, FileEntry]:
    if not isinstance(value, dict):
        raise BundleError("must be an object", field="files")
    if len(value) > MAX_FILES:
        raise BundleError(f"has {len(value)} entries; at most {MAX_FILES}", field="files")
    files = {}
    for name, entry in value.items():
        with inside(f"files[{name!r}]"):
            files[name] = FileEntry.from_json(entry)
    return files


_MANIFEST_KEYS = (
    "schema_version",
    "name",
    "task",
    "precision",
    "method",
    "T",
    "full_steps",
    "default_steps",
    "dial",
    "grid_steps",
    "depth",
    "cache",
    "input",
    "target_max_tokens",
    "labels",
    "tokenizer",
    "shape",
    "weights",
    "rungs",
    "range",
    "step",
    "embedding",
    "calibration",
    "card",
    "provenance",
    "files",
)


def check_name(name: object) -> None:
    """BundleError unless a model can have this name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BundleError(
            f"is {shown(name)}; use 1 to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first",
            field="name",
        )


LATENCY_VERSION = 1
MAX_ENTRIES = 10_000
_MAX_MS = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the table was measured."""

    cpu: str
    cores: int
    threads: int
    runtime: str

    def __post_init__(self) -> None:
        check_text("cpu", self.cpu)
        check_integer("cores", self.cores, 1, 1 << 16)
        check_integer("threads", self.threads, 1, 1 << 16)
        check_text("runtime", self.runtime)

    @classmethod
    def from_json(cls, value: object) -> Self:
        return cls(**check_members(value, ("cpu", "cores", "threads", "runtime")))


@dataclass(frozen=True, slots=True)
class LatencyEntry:
    """The time of one call on `batch` rows of `length` (decode: cached positions)."""

    steps: int
    kind: Literal["classify", "prefill", "decode"]
    batch: int
    length: int
    median_ms: float
    p95_ms: float

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, 1, MAX_STEPS)
        check_choice("kind", self.kind, ("classify", "prefill", "decode"))
        check_integer("batch", self.batch, 1, 1 << 20)
        check_integer("length", self.length, 0, MAX_TOKENS)
        check_number("median_ms", self.median_ms, 0.0, _MAX_MS)
        check_number("p95_ms", self.p95_ms, self.median_ms, _MAX_MS)

    @classmethod
    def from_json(cls, value: object) -> Self:
        keys = ("steps", "kind", "batch", "length", "median_ms", "p95_ms")
        return cls(**check_members(value, keys))


@dataclass(frozen=True, slots=True)
class Latency:
    """All measurements of one bundle on one machine."""

    machine: Machine
    measured_at: str
    entries: tuple[LatencyEntry, ...]
    schema_version: int = LATENCY_VERSION

    def __post_init__(self) -> None:
        check_version(self.schema_version, LATENCY_VERSION)
        check_text("measured_at", self.measured_at, 64)
        try:
            datetime.fromisoformat(self.measured_at)
        except ValueError:
            raise BundleError(
                f"is {self.measured_at!r}; write an ISO 8601 time", field="measured_at"
            ) from None
        seen: set[tuple[int, str, int, int]] = set()
        for index, entry in enumerate(self.entries):
            point = (entry.steps, entry.kind, entry.batch, entry.length)
            if point in seen:
                raise BundleError(
                    "repeats the steps, kind, batch and length of an earlier entry; keep one",
                    field=f"entries[{index}]",
                )
            seen.add(point)

    def to_json(self) -> dict[str, Any]:
        """The table as the value of latency.json."""
        value: dict[str, Any] = plain(self)
        return {"schema_version": value.pop("schema_version"), **value}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The table that a latency.json holds."""
        keys = ("schema_version", "machine", "measured_at", "entries")
        members = dict(check_members(value, keys))
        with inside("machine"):
            members["machine"] = Machine.from_json(members["machine"])
        entries = []
        for index, entry in enumerate(check_list("entries", members["entries"], MAX_ENTRIES)):
            with inside(f"entries[{index}]"):
                entries.append(LatencyEntry.from_json(entry))
        members["entries"] = tuple(entries)
        return cls(**members)
