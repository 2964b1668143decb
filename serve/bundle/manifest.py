"""Every member of a bundle's manifest and latency table, with its rules.

Only the JSON is checked here; serve/bundle/folder.py checks the files. docs/bundle.schema.json is
written from these classes: `python -m docs.generate`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY
from datetime import datetime
from typing import Annotated, Final, Literal, get_args

from pydantic import BeforeValidator, Field

from serve.bundle.part import (
    FILE_NAME,
    GIVEN,
    NULL,
    BundleError,
    Facts,
    FileName,
    Flag,
    Name,
    Part,
    Rule,
    Sha256,
    between,
    one_of,
    part,
    several,
    shown,
    text,
)

Task = Literal["generate", "classify", "translate", "tag"]
Depth = Literal["ode", "fixed", "chain"]
Cache = Literal["kv", "kv_fp16", "kv_int8", "none"]  # of 32, 16 or 8 bits, or no caches
# How rungs relate: each M crosses [0, T] in steps of T / M, or all follow one grid and stop at M.
Dial = Literal["resolution", "time"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
Method = Literal["euler", "ab2", "midpoint", "heun", "rk4"]
Effort = Literal["low", "medium", "high", "max"]
Metric = Literal["loss", "accuracy", "bleu"]
TokenizerKind = Literal["chars", "bpe", "words", "wordpiece", "unigram"]

SCHEMA_VERSION: Final = 2
LATENCY_VERSION: Final = 1
MANIFEST_FILE = "manifest.json"
LATENCY_FILE = "latency.json"
EVALUATIONS_PER_STEP: dict[str, int] = {"euler": 1, "ab2": 1, "midpoint": 2, "heun": 2, "rk4": 4}
METHODS = tuple(EVALUATIONS_PER_STEP)
EFFORTS: tuple[Effort, ...] = get_args(Effort)
LABELLING: tuple[Task, ...] = ("classify", "tag")  # one label a row, or one a position
_CACHE_BITS = {"kv_fp16": 16, "kv_int8": 8}  # of those that are rounded
MAX_RUNGS = 64
MAX_FILES = 1024
MAX_TOKENS = 1 << 20
MAX_EVALUATIONS = 1 << 20

Steps = Annotated[int, between(1, 1024)]
Tokens = Annotated[int, between(1, MAX_TOKENS)]
Kept = Annotated[int, between(0, MAX_TOKENS)]
TokenId = Annotated[int, between(0, (1 << 24) - 1)]
Rows = Annotated[int, between(1, 1 << 53)]
Number = Annotated[float, between(-1e30, 1e30)]
Size = Annotated[float, between(0.0, 1e30)]
Share = Annotated[float, between(0.0, 1.0)]
InnerShare = Annotated[float, between(1e-9, 1 - 1e-9)]  # neither 0 nor 1
Milliseconds = Annotated[float, between(0.0, 1e9)]


def steps_in_words(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


@part
class Quality(Part):
    """A rung's measured quality on held-out data, with its confidence interval."""

    OPTIONAL = frozenset({"exact"})
    ASCENDING = ("low", "value", "high")
    RULES = (
        Rule({"metric": ("accuracy",)}, {"value": {"minimum": 0, "maximum": 1}}),
        Rule({"metric": ("bleu",)}, {"value": {"minimum": 0, "maximum": 100}}),
    )

    metric: Metric
    value: Number
    low: Number
    high: Number
    samples: Rows
    exact: Share | None = None  # taggers: the share of rows with every position right


@part
class Range(Part):
    """The last rung's quality less the first rung's: mean over the rows, and its interval.

    Above 0 is better, whatever the metric. Both rungs were measured on the same rows, so the
    interval is that of a paired difference.
    """

    ASCENDING = ("low", "value", "high")

    value: Number
    low: Number
    high: Number


@part
class Verified(Part):
    """How far the graph's float32 answer was from the model's, and the tolerance."""

    ASCENDING = ("max_abs_error", "tolerance")

    max_abs_error: Size
    tolerance: Size
    float32_error: Size


@part
class AgainstFp32(Part):
    """What a lower precision changed, on the rows of the quality measurement."""

    top1_agreement: Share  # share of answers equal to float32's
    change: Number  # of the metric: its value less float32's
    samples: Rows


@part
class Rung(Part):
    """One operating point: a method with a number of steps, as one fixed-step graph."""

    RULES = (Rule({"dominated": (True,)}, {"effort": NULL}),)

    steps: Steps
    method: Method
    nfe: Annotated[int, between(1, MAX_EVALUATIONS)]
    effort: Effort | None
    graph: FileName
    quality: Quality
    verified: Verified
    encoder: FileName | None = None  # translators: the graph that reads the source
    dominated: Flag = False  # fewer steps are at least as good
    against_fp32: AgainstFp32 | None = None  # in a lower precision

    @property
    def spent(self) -> int:
        """Evaluations of a velocity that is integrated in these steps."""
        return self.steps * EVALUATIONS_PER_STEP[self.method]

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs of the rung, by field."""
        graphs = {"graph": self.graph}
        return graphs if self.encoder is None else graphs | {"encoder": self.encoder}


@part
class TokenizerSpec(Part):
    """Where the tokenizer is, and the facts that the graphs rely on."""

    OPTIONAL = frozenset({"chat_template"})

    kind: TokenizerKind
    file: FileName
    pad_id: TokenId
    vocab_size: Annotated[int, between(1, 1 << 24)]
    bos_id: TokenId | None = None  # begins every answer of a translator
    eos_id: TokenId | None = None  # ends it; of a generator, any answer
    chat_template: FileName | None = None  # the file that turns messages into a prompt

    def check(self) -> None:
        taken: dict[int, str] = {}
        for field in ("pad_id", "bos_id", "eos_id"):
            token = getattr(self, field)
            if token is None:
                continue
            if token >= self.vocab_size:
                raise BundleError(
                    f"must be less than vocab_size ({self.vocab_size}), not {token}", field=field
                )
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


@part
class Shape(Part):
    """The size of one velocity; a decoder's caches follow from it."""

    OPTIONAL = frozenset({"state"})
    ASCENDING = ("width", "state")

    layers: Annotated[int, between(1, 1024)]
    heads: Annotated[int, between(1, 1024)]
    head_width: Annotated[int, between(1, 4096)]
    width: Annotated[int, between(1, 1 << 16)]
    parameters: Annotated[int, between(1, 10**12)]
    # Width of a decoder's state between steps, where it is larger.
    state: Annotated[int, between(1, 1 << 17)] | None = None

    @property
    def state_width(self) -> int:
        """The width of a decoder's state between steps, which may hold more than x."""
        return self.width if self.state is None else self.state


@part
class StepFiles(Part):
    """The graphs of one step: embedding, step, and head."""

    OPTIONAL = frozenset({"endings"})

    embed: FileName
    step: FileName
    head: FileName
    endings: Flag = False  # whether a shorter answer ends with a step of its own, at time -(t + h)

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs by field."""
        return {"embed": self.embed, "step": self.step, "head": self.head}


@part
class FileEntry(Part):
    """The size and hash of a file."""

    sha256: Sha256
    bytes: Annotated[int, between(0, 1 << 40)]


@part
class Truncation(Part):
    """Of a text that is too long, keep the first `head` and the last `tail` tokens."""

    head: Kept
    tail: Kept

    def check(self) -> None:
        if self.head + self.tail == 0:
            raise BundleError(
                "must be at least 1 when tail is 0: some token must stay", field="head"
            )


@part
class TextInput(Part):
    """Tokens; for a translator, those of the source."""

    OPTIONAL = frozenset({"exact"})
    RULES = (Rule({"exact": (True,)}, {"truncation": NULL}),)

    _: KW_ONLY
    kind: Literal["text"] = "text"
    max_tokens: Tokens
    truncation: Truncation | None = None
    exact: Flag = False  # every text has max_tokens tokens, no more and no fewer

    def check(self) -> None:
        kept = self.truncation.head + self.truncation.tail if self.truncation is not None else 0
        if kept > self.max_tokens:
            raise BundleError(
                f"keeps {kept} tokens, more than max_tokens ({self.max_tokens}); "
                "lower head or tail",
                field="truncation",
            )


@part
class ImageInput(Part):
    """Images of one size; a value from 0 to 1 reaches the graph as (value - mean) / std."""

    _: KW_ONLY
    kind: Literal["image"] = "image"
    channels: Annotated[int, between(1, 4)]  # 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    height: Annotated[int, between(1, 4096)]
    width: Annotated[int, between(1, 4096)]
    mean: Annotated[tuple[Annotated[float, between(-1e6, 1e6)], ...], several(4, 1)]
    std: Annotated[tuple[Annotated[float, between(1e-6, 1e6)], ...], several(4, 1)]

    def check(self) -> None:
        for field, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise BundleError(
                    f"has {len(values)} numbers for {self.channels} channels; give one each",
                    field=field,
                )


@part
class PointsInput(Part):
    """Clouds of up to `max_points` points, each centred and scaled into the unit sphere."""

    _: KW_ONLY
    kind: Literal["points"] = "points"
    max_points: Annotated[int, between(1, 1 << 16)]
    dimensions: Annotated[int, between(1, 16)]


InputSpec = TextInput | ImageInput | PointsInput


# Calibration of early answers. After each evaluation but the last, the jump to the end gives
# logits. A row stops there if the margin of its largest logit reaches the threshold; otherwise it
# gets the full-step answer. What a level guarantees, with the given confidence over the draw of the
# calibration rows: on data like them, the share of answers that differ from the full-step answer is
# at most `max_disagreement`. Each level holds on its own. A request between two levels uses the
# stricter one; a request below the strictest, or a level without a threshold, runs all steps.


@part
class Level(Part):
    """An allowed disagreement, and the margin that an early answer needs to keep it."""

    ASCENDING = ("observed", "max_disagreement")

    max_disagreement: InnerShare
    threshold: Size | None  # None: none could be certified, so run all steps
    evaluations: Annotated[float, between(1.0, float(MAX_EVALUATIONS))]  # mean per calibration row
    observed: Share  # share of the calibration rows whose answer differed


@part
class Calibration(Part):
    """The levels certified on these rows, from the strictest to the loosest."""

    rows: Rows
    confidence: InnerShare
    source: Annotated[str, text(1000)]
    levels: Annotated[tuple[Level, ...], several(16, 1)]

    def check(self) -> None:
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


def _needed(level: Level) -> float:
    return math.inf if level.threshold is None else level.threshold


def rounds(precision: Precision, cache: Cache) -> bool:
    """Whether weights or caches have a lower precision than in training."""
    return precision != "fp32" or cache in _CACHE_BITS


def _few(files: object) -> object:
    if isinstance(files, Mapping) and len(files) > MAX_FILES:  # before any of them is looked at
        raise BundleError(f"has {len(files)} entries; at most {MAX_FILES}")
    return files


_LISTED = {"pattern": FILE_NAME, "not": one_of(MANIFEST_FILE, LATENCY_FILE)}
Files = Annotated[
    Mapping[FileName, FileEntry],
    Field(json_schema_extra={"maxProperties": MAX_FILES, "propertyNames": _LISTED}),
    BeforeValidator(_few),
]
# What task, depth, dial, cache and precision ask of each other and of all other members.
_RULES = (
    Rule({"task": LABELLING}, {"labels": GIVEN}),
    Rule({"task": ("generate", "translate")}, {"labels": NULL}),
    Rule({"task": ("generate", "translate", "tag")}, {"input.kind": one_of("text")}),
    Rule({"input.kind": ("text",)}, {"tokenizer": GIVEN}),
    Rule({"input.kind": ("image", "points")}, {"tokenizer": NULL, "embedding": NULL}),
    Rule(
        {"task": ("generate", "translate")},
        {"input.truncation": NULL, "input.exact": one_of(False), "calibration": NULL},
    ),
    Rule(
        {"task": ("classify", "translate", "tag")},
        {"cache": one_of("none"), "tokenizer.chat_template": NULL},
    ),
    Rule({"task": ("generate", "translate", "tag")}, {"embedding": NULL}),
    Rule({"task": LABELLING}, {"tokenizer.eos_id": NULL}),  # a generator may have one
    Rule(
        {"task": ("translate",)},
        {
            "target_max_tokens": GIVEN,
            "tokenizer.bos_id": GIVEN,
            "tokenizer.eos_id": GIVEN,
            "rungs[].encoder": GIVEN,
            "step": NULL,
        },
    ),
    Rule(
        {"task": ("generate", "classify", "tag")},
        {
            "target_max_tokens": NULL,
            "tokenizer.bos_id": NULL,
            "rungs[].encoder": NULL,
            "rungs[].quality.metric": one_of("loss", "accuracy"),
        },
    ),
    Rule({"task": ("generate", "classify", "translate")}, {"rungs[].quality.exact": NULL}),
    Rule({"dial": ("time",)}, {"grid_steps": GIVEN}),
    Rule({"dial": ("resolution",)}, {"grid_steps": NULL, "step.endings": one_of(False)}),
    Rule({"task": ("generate",)}, {"step.endings": one_of(False)}),
    # Only one ODE has one clock to stop.
    Rule({"depth": ("fixed", "chain")}, {"dial": one_of("resolution"), "calibration": NULL}),
    # With weights that differ by depth there is one rung, of one step.
    Rule({"depth": ("fixed",)}, {"method": one_of("euler"), "rungs[].steps": one_of(1)}),
    Rule({"depth": ("chain",)}, {"cache": one_of("none")}),
    Rule({"depth": ("ode",), "task": ("generate", "classify", "tag")}, {"step": GIVEN}),
    Rule({"depth": ("fixed", "chain"), "cache": ("none",)}, {"step": NULL}),
    Rule({"cache": ("kv", "kv_fp16", "kv_int8")}, {"step": GIVEN}),
    Rule({"cache": ("none",)}, {"shape.state": NULL}),
    Rule(
        {"method": ("ab2", "midpoint", "heun", "rk4")},
        {"calibration": NULL, "step.endings": one_of(False)},
    ),
    Rule({"precision": ("fp32",), "cache": ("kv", "none")}, {"rungs[].against_fp32": NULL}),
    Rule({"precision": ("fp16", "bf16", "int8")}, {"rungs[].against_fp32": GIVEN}),
    Rule({"cache": ("kv_fp16", "kv_int8")}, {"rungs[].against_fp32": GIVEN}),
)


@part
class Manifest(Part):
    """Everything a server needs to know of a model before it opens a graph.

    `files` is empty until the bundle is sealed; a manifest that was read lists every file.
    """

    OPTIONAL = frozenset({"dial", "grid_steps", "range", "embedding"})
    RULES = _RULES

    _: KW_ONLY
    name: Name
    task: Task
    precision: Precision = "fp32"
    method: Method
    T: Annotated[float, between(1e-6, 1e6)]
    full_steps: Steps
    default_steps: Steps
    dial: Dial = "resolution"
    grid_steps: Steps | None = None  # dial of time: steps that cross [0, T]
    depth: Depth = "ode"
    cache: Cache
    input: Annotated[InputSpec, Field(discriminator="kind")]
    # Translators: the longest answer.
    target_max_tokens: Annotated[int, between(2, MAX_TOKENS)] | None = None
    labels: (
        Annotated[tuple[Annotated[str, text(1000)], ...], several(100_000, 2, uniqueItems=True)]
        | None
    )
    tokenizer: TokenizerSpec | None
    shape: Shape
    weights: FileName
    rungs: Annotated[tuple[Rung, ...], several(MAX_RUNGS, 1)]
    range: Range | None = None  # of its quality, if measured
    step: StepFiles | None = None  # graphs of one step, which can run any rung
    # Numbers in the embedding of a text, if the graphs give one.
    embedding: Annotated[int, between(1, 1 << 16)] | None = None
    calibration: Calibration | None = None  # of early answers
    card: Facts = Field(default_factory=dict)
    provenance: Facts = Field(default_factory=dict)
    files: Files = Field(default_factory=dict)
    schema_version: Literal[2] = SCHEMA_VERSION

    def check(self) -> None:
        for field, problem in self._wrong():
            raise BundleError(problem, field=field)

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
    def early_levels(self) -> list[float]:
        """The values of max_disagreement at which answers can stop early."""
        levels = () if self.calibration is None else self.calibration.levels
        return [level.max_disagreement for level in levels if level.threshold is not None]

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
            f"{self.name} does not offer {steps_in_words(steps)}; it has {self._ladder()}"
        )

    def check_read(self) -> None:
        for name in self._uses().values():
            if name not in self.files:
                raise BundleError(
                    f"does not list {name}, which the manifest uses; export the bundle again",
                    field="files",
                )

    def _ladder(self) -> str:
        return ", ".join(map(str, self.steps))

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

    def _wrong_in_ladder(self) -> Iterator[tuple[str, str]]:
        """Fields of rungs, and what is wrong with them beside the others."""
        metric, before, effort = self.rungs[0].quality.metric, 0, -1
        for index, rung in enumerate(self.rungs):
            here = f"rungs[{index}]"
            if rung.method != self.method:
                yield (
                    f"{here}.method",
                    f"is {rung.method}, but the bundle's method is {self.method}: a bundle has "
                    "one method",
                )
            if rung.quality.metric != metric:
                yield (
                    f"{here}.quality.metric",
                    f"is {rung.quality.metric}, but the first step count's is {metric}: a "
                    "bundle has one metric",
                )
            if rung.steps <= before:
                yield (
                    f"{here}.steps",
                    f"is {rung.steps} after {before}; sort rungs by steps, each once",
                )
            if rung.effort is not None:
                if EFFORTS.index(rung.effort) <= effort:
                    yield (
                        f"{here}.effort",
                        f"is {rung.effort} after {EFFORTS[effort]}; each word names one step "
                        "count, and a greater effort has more steps",
                    )
                effort = EFFORTS.index(rung.effort)
            before = rung.steps
            spent = (
                rung.spent if self.depth == "chain" or self.task != "translate" else 2 * rung.spent
            )
            if rung.nfe % spent if self.depth == "chain" else rung.nfe != spent:
                a_multiple = "a multiple of " if self.depth == "chain" else ""
                yield (
                    f"{here}.nfe",
                    f"is {rung.nfe}, but must be {a_multiple}{spent} for "
                    f"{steps_in_words(rung.steps)} of {rung.method}; export the bundle again",
                )

    def _wrong(self) -> Iterator[tuple[str, str]]:
        """Fields that do not go with others, and what is wrong with them."""
        yield from self._wrong_in_ladder()
        if self.full_steps != self.steps[-1]:
            largest = steps_in_words(self.steps[-1])
            yield "full_steps", f"is {self.full_steps}, but the largest step count has {largest}"
        if self.default_steps not in self.steps:
            yield (
                "default_steps",
                f"is {self.default_steps}, which is no step count of rungs: {self._ladder()}",
            )
        if self.range is not None and len(self.rungs) == 1:
            yield "range", "must be null for one step count"
        labels = set[str]()
        for index, label in enumerate(self.labels or ()):
            if label in labels:
                yield (
                    f"labels[{index}]",
                    f"repeats {shown(label)}; every class has a label of its own",
                )
            labels.add(label)
        used = {MANIFEST_FILE: "the manifest", LATENCY_FILE: "the latency table"}
        for name in used:
            if name in self.files:
                yield "files", f"lists {name}, which is never hashed; remove that entry"
        for where, name in self._uses().items():
            if name in used:
                yield (
                    where,
                    f"is {name}, which is {used[name]} already; give each file its own name",
                )
            used[name] = where


@part
class Machine(Part):
    """Where the table was measured."""

    cpu: Annotated[str, text()]
    cores: Annotated[int, between(1, 1 << 16)]
    threads: Annotated[int, between(1, 1 << 16)]
    runtime: Annotated[str, text()]


@part
class LatencyEntry(Part):
    """The time of one call on `batch` rows of `length` (decode: cached positions)."""

    ASCENDING = ("median_ms", "p95_ms")

    steps: Steps
    kind: Literal["classify", "prefill", "decode"]
    batch: Annotated[int, between(1, 1 << 20)]
    length: Kept
    median_ms: Milliseconds
    p95_ms: Milliseconds


@part
class Latency(Part):
    """All measurements of one bundle on one machine."""

    machine: Machine
    measured_at: Annotated[str, text(64)]
    entries: Annotated[tuple[LatencyEntry, ...], several(10_000)]
    schema_version: Literal[1] = LATENCY_VERSION

    def check(self) -> None:
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
