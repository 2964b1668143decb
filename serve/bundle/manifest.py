"""The manifest of a bundle: what the model is, what it takes, its ladder, its files.

Knows the rules within the manifest; not whether the files exist: reading a bundle checks that.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from serve.bundle.calibration import Calibration
from serve.bundle.fields import (
    BundleError,
    check_choice,
    check_facts,
    check_file_name,
    check_integer,
    check_list,
    check_members,
    check_number,
    inside,
    plain,
    shown,
)
from serve.bundle.inputs import InputSpec, TextInput, read_input
from serve.bundle.rung import METHODS, Method, Range, Rung, check_ladder, steps_in_words
from serve.bundle.spec import FileEntry, Shape, StepFiles, TokenizerSpec
from serve.bundle.task import (
    CACHES,
    DEPTHS,
    DIALS,
    LABELLING,
    MAX_LABELS,
    TASKS,
    Cache,
    Depth,
    Dial,
    Task,
    check_depth,
    check_dial,
    check_task,
)

SCHEMA_VERSION = 2
MANIFEST_FILE = "manifest.json"
LATENCY_FILE = "latency.json"
PRECISIONS = ("fp32", "int8")
MAX_RUNGS = 64
MAX_FILES = 1024
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_EDITION = "@"  # which is in no name of a model

Precision = Literal["fp32", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a server must know of a model before it opens a graph.

    `files` is empty until the bundle is sealed; a manifest read from disk lists every file.
    """

    name: str
    task: Task
    precision: Precision = "fp32"
    method: Method
    T: float
    full_steps: int
    default_steps: int
    dial: Dial = "resolution"
    grid_steps: int | None = None  # of the dial of time: as many steps as cross [0, T]
    depth: Depth = "ode"
    cache: Cache
    input: InputSpec
    target_max_tokens: int | None = None  # of a translator: the longest answer
    labels: tuple[str, ...] | None
    tokenizer: TokenizerSpec | None
    shape: Shape
    weights: str
    rungs: tuple[Rung, ...]
    range: Range | None = None  # of its quality, where it was measured
    step: StepFiles | None = None  # graphs of one step, which make any rung
    calibration: Calibration | None = None  # of early answers
    card: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
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
        """The h of each of so many steps: all of the grid's size, or as many as cross [0, T]."""
        return self.T / (self.grid_steps or steps)

    @property
    def labelled(self) -> bool:
        """Whether it answers with labels: one for a row, or one for each position."""
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
        """Whether weights or caches have fewer bits than the model was trained with."""
        return self.precision != "fp32" or self.cache == "kv_int8"

    @property
    def precision_in_words(self) -> str:
        """As people are told, with what is kept in caches if that has a precision of its own."""
        return f"{self.precision}, 8-bit caches" if self.cache == "kv_int8" else self.precision

    @property
    def text_input(self) -> TextInput:
        """The input of a model that is known to take text."""
        assert isinstance(self.input, TextInput), f"{self.name} takes no text"
        return self.input

    @property
    def text_tokenizer(self) -> TokenizerSpec:
        """The tokenizer of a model that is known to take text."""
        assert self.tokenizer is not None, f"{self.name} takes no text"
        return self.tokenizer

    def rung(self, steps: int) -> Rung:
        """The rung of that many steps."""
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
        """The manifest that a manifest.json holds; refuses everything that it does not know."""
        if isinstance(value, dict) and "schema_version" in value:
            # Before the keys: a later schema has other keys, and its number explains them best.
            check_version(value["schema_version"], SCHEMA_VERSION)
        if isinstance(value, dict):
            # Bundles of earlier releases have the dial of resolution and say none of these.
            value = {"dial": "resolution", "grid_steps": None, "range": None} | value
        members = dict(check_members(value, _KEYS))
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
        """Every file that the manifest speaks of has its entry, as in a sealed bundle."""
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
        """The files that the manifest speaks of, by the field that names them."""
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


_KEYS = (
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
    "calibration",
    "card",
    "provenance",
    "files",
)


def model_key(name: str, edition: int) -> str:
    """What a loaded model is called inside a server: each that takes its place has another key."""
    return f"{name}{_EDITION}{edition}" if edition else name


def model_name(key: str) -> str:
    """The name in a key."""
    return key.partition(_EDITION)[0]


def check_name(name: object) -> None:
    """BundleError unless a model can have this name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BundleError(
            f"is {shown(name)}; use 1 to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first",
            field="name",
        )
