"""Recipes: every setting with its limits, and their TOML files."""

import copy
import dataclasses
import difflib
import itertools
import json
import math
import re
import tomllib
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

_SINGLE_STEP = ("residual", "rk2", "rk2-gamma1", "rk2-learned", "rk4")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LONGEST_PARITY = 16
FEWEST = 300  # iterations of a table, however few rows it has
MOST_THREADS = 1024  # far more of them crash the libraries below torch

Accelerator = Literal["auto", "cpu", "cuda"]
Scheme = Literal[
    "residual",
    "rk2",
    "rk2-gamma1",
    "rk2-learned",
    "rk4",
    "leapfrog",
    "multistep",
    "dlcl",
    "polynet",
]
Function = Literal["block", "attention", "feedforward", "halves"]


class RecipeError(ValueError):
    """A recipe that cannot be used, with the key and what to change."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where examples come from: files of several kinds, a generator, or a stream."""

    kind: Literal[
        "text",
        "stream",
        "table",
        "tags",
        "images",
        "points",
        "pairs",
        "stdlib",
        "parity",
        "listops",
        "logic",
    ]
    path: str = ""  # the corpus file, the folder of the other files, or the name of the stream
    # wordpiece and unigram are those of pretrained models, and never learnt here
    tokenizer: Literal["chars", "bpe", "words", "wordpiece", "unigram"] = "chars"
    tokenizer_file: str = ""  # stream: a tokenizer.json to use instead of learning one
    vocabulary: int = 8192  # size of a BPE vocabulary, the most words of a word vocabulary
    pad_id: int = 0  # the token that is padding; other than 0 in some pretrained models
    lowercase: bool = False
    held_out: float = 0.1  # share of a corpus or table kept for validation
    # The training file and the official test file, if there is one. Tables: .csv, .jsonl, also .gz
    # or .xz. Text: .txt, also .gz. Images and points: idx files, or FILE.npz:KEY.
    # Pairs: what stands before ".en".
    train: str = ""
    test: str = ""
    validation: str = ""  # text and pairs: a validation file of its own
    train_labels: str = ""  # images and points: where the classes are
    test_labels: str = ""
    text: tuple[str, ...] = ("text",)  # columns joined by a space; numbers where there is no header
    label: str = "label"
    labels: tuple[str, ...] = ()  # names shown for the classes
    values: tuple[str, ...] = ()  # how the file writes the classes, in the order of `labels`
    head: int = 0  # a long text keeps its first `head` and last `tail` tokens
    tail: int = 0
    longest: int = 0  # generators: longest example
    shortest: int = 0  # listops: shortest example; above 0 nests deeper, as the long-range test
    nesting: int = 0  # listops: every depth from 1 to this is as frequent; 0: as it comes
    rows: int = 0  # generators: how many examples
    side: Literal[6, 9] = 6  # logic: cells of a row of the grid
    givens: tuple[int, ...] = (9, 13)  # logic: the fewest and the most cells that are given
    rounds: int = 0  # logic: how often a person looks for the next cells, at least
    mean: tuple[float, ...] = ()  # images: of each channel of the pixels, from 0 to 1; () measures
    std: tuple[float, ...] = ()
    shift: int = 0  # images: move by up to so many pixels in training
    flip: bool = False  # images: mirror half of them in training
    languages: tuple[str, ...] = ("en", "de")  # pairs: from, to


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: Literal["decoder", "encoder", "tagger", "image", "set", "translator"]
    # One ODE, one pass through blocks of their own weights, or a chain of ODEs, one a block.
    depth: Literal["ode", "discrete", "chain"] = "ode"
    block: Literal["transformer", "runge-kutta", "evolved", "timed"] = "transformer"
    layers: int = 2
    heads: int = 4
    width: int = 128
    hidden: int = 512  # 0: attention only
    window: int = 128  # tokens, or points
    target_window: int = 128  # translator: tokens of an answer
    norm: Literal["pre", "post", "none"] = "pre"
    # Inside the velocity, before the head, after pooling, or nowhere.
    final_norm: Literal["inside", "outside", "pooled", "none"] = "outside"
    positions: Literal["learned", "sinusoidal"] = "learned"
    reach: int = 0  # relative positions up to this distance, in self-attention; 0 has none
    activation: Literal["gelu", "gelu-exact", "relu"] = "gelu"
    project: bool = True  # whether attention ends in a linear layer
    head_width: int = 0  # encoder and image: of each head; 0 is width / heads
    # First weights: N(0, 0.02); that but N(0, 1 / channels in) in blocks; torch's own; or Glorot's
    # uniform ones.
    initial: Literal["gpt2", "scaled", "torch", "glorot"] = "gpt2"
    bias: bool = True  # of the linear layers and norms of the blocks
    tied: bool = False  # decoder: the head reads out with the weights of the token embedding
    pool: Literal["mean", "max", "first"] = "mean"
    head_layers: int = 0  # encoder and image: layers as wide as the model before the output layer
    conditioned: bool = False  # the velocity sees the size of the step
    timed: bool = False  # the velocity sees the time
    # The velocity is F(x), the blocks; or F(x) - x: a step of size 1 is then x <- F(x).
    velocity: Literal["block", "residual"] = "block"
    inject: bool = False  # every evaluation sees the embedded input again
    prelude: int = 0  # blocks of their own weights before the steps
    coda: int = 0  # and after them
    dropout: float = 0.0
    embed_dropout: float = 0.0
    attention_dropout: float = 0.0  # of attention's shares; evolved blocks: of queries and keys
    activation_dropout: float = 0.0  # of what the activation of a feed-forward gives
    T: float = 1.0
    patch: int = 7  # image: side of a patch
    inducing: int = 16  # set: inducing points of a block
    scheme: Scheme = "residual"  # of runge-kutta blocks
    function: Function = "block"  # what the scheme takes for F: a block, a half of it, or each half
    scheme_in_decoder: bool = True  # translator: or residual blocks there
    evolve: int = 6  # evolved: depth of a block
    feedforward: Literal["full", "random"] = "full"  # of evolved blocks
    inner_skip: bool = True  # of timed blocks
    timed_attention: bool = False  # of timed blocks: attention knows the time too


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """How many steps each batch takes in training."""

    method: Literal["euler", "ab2", "midpoint", "heun", "rk4"] = "euler"
    full: int = 8
    # resolution: any count of steps crosses [0, T]. time: a step is T / full, so that fewer steps
    # end earlier, and more than `full` go on beyond T.
    dial: Literal["resolution", "time"] = "resolution"
    # any: one count a batch; sandwich: full, the smallest and one other count on every batch;
    # tail: counts about `full`, log-normal, up to four times as many.
    schedule: Literal["any", "fixed", "sandwich", "tail"] = "any"
    short: tuple[int, ...] = (1, 2, 4)  # the smaller counts that are drawn from
    full_probability: float = 0.5
    grow: float = 0.5  # share of the training cost spent at one step first; not with `fixed`
    # In place of `grow`: shares of the iterations in which no more than the first, the second, ...
    # of `short` and `full` steps are taken; with `tail`, counts about it.
    stages: tuple[float, ...] = ()
    # time: counts at which the answer of one trajectory is read and trained, on the way to the
    # count of the batch, and the weights of those and of `full`. Without weights the last one has
    # `full_probability`, and the others share the rest.
    exits: tuple[int, ...] = ()
    exit_weights: tuple[float, ...] = ()
    backprop: int = 0  # gradients go back through so many steps at most; 0: through all
    # Sandwich and exits: weight of the divergence of shorter answers from the longest one.
    distil: float = 0.0
    jump: float = 0.0  # weight of the divergence of jumps from the full answer
    distil_from: float = 0.0  # share of the training cost after which both begin
    solver: Literal["fixed", "adaptive"] = "fixed"
    tolerance: float = 1e-5  # of the adaptive solver, absolute and relative
    checkpoint: bool = False  # recompute each step going backward: less memory, more time


@dataclass(frozen=True, slots=True)
class OptimConfig:
    iterations: int = 1000
    # Passes over the rows of a table. Training ends after them if that is before `iterations`, and
    # never before FEWEST iterations. 0: `iterations` alone counts.
    epochs: float = 0.0
    # Only for `convert --rank`: the number of iterations, at the end, in which the endings learn
    # and all other weights stay as they are. They count as part of `iterations`.
    endings: int = 0
    batch: int = 32
    accumulate: int = 1
    lr: float = 1e-3
    final_lr: float = 0.05  # of lr, at the end of the cosine
    warmup: int = 100
    # inverse-sqrt: lr is the rate after warm-up; then it falls as 1 / sqrt(iteration).
    schedule: Literal["cosine", "drops", "inverse-sqrt"] = "cosine"
    drops: tuple[float, ...] = ()  # shares of the training after each of which lr falls tenfold
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0
    transport: float = 0.1  # lambda, the weight of the transport cost
    # What lambda weighs: the transport cost, its excess over the straight way, or its mean in time.
    penalty: Literal["transport", "curvature", "speed"] = "transport"
    smoothing: float = 0.0  # label smoothing
    # Tables: balanced gives every class the same weight in the loss, however few rows it has.
    class_weights: Literal["equal", "balanced"] = "equal"
    average: int = 0  # the model that a run leaves is the mean of so many last checkpoints
    token_dropout: float = 0.0  # share of input tokens hidden from a classifier
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """A trained run that a model learns from, beside the labels."""

    run: str = ""  # its folder; "" for none
    weight: float = 0.7  # of its answers; what is left is that of the labels
    temperature: float = 2.0  # that both answers are softened by
    states: float = 0.0  # weight of the distance to its states along the way


@dataclass(frozen=True, slots=True)
class RunConfig:
    seed: int = 0
    evaluate_every: int = 500
    evaluate_batches: int = 20
    checkpoint_every: int = 500
    keep: Literal["last", "best"] = "last"  # the weights of which evaluation are the run's
    patience: int = 0  # evaluations in a row without a better one that end the run; 0: none do
    threads: int = 0  # 0: as many as torch picks
    accelerator: Accelerator = "auto"


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
    teacher: TeacherConfig = field(default_factory=TeacherConfig)

    def __post_init__(self) -> None:
        for sentence, holds in {
            **_data_and_model_rules(self.data, self.model),
            **_training_rules(self.steps, self.optim, self.run),
            'optim.epochs needs data.kind "table"': (
                not self.optim.epochs or self.data.kind == "table"
            ),
            'optim.class_weights "balanced" needs data.kind "table" and one label a row': (
                self.optim.class_weights == "equal"
                or (self.data.kind == "table" and self.model.family == "encoder")
            ),
            **_teacher_rules(self.teacher, self.data),
            **_depth_rules(self.model, self.steps, self.optim),
            **_dial_rules(self.model, self.steps),
            "name must be 1 to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first": bool(
                _NAME.fullmatch(self.name)
            ),
        }.items():
            if not holds:
                raise RecipeError(f"recipe {self.name!r}: {sentence}")

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


def _data_and_model_rules(data: DataConfig, model: ModelConfig) -> dict[str, bool]:
    sizes = (model.layers, model.heads, model.width, model.window, model.target_window)
    made = data.kind in ("parity", "listops", "logic")
    cells = data.side**2
    family = {
        "text": "decoder",
        "stream": "decoder",
        "stdlib": "decoder",
        "images": "image",
        "points": "set",
        "pairs": "translator",
        "tags": "tagger",
        "logic": "tagger",
    }.get(data.kind, "encoder")
    depth = {"runge-kutta": "discrete", "evolved": "discrete", "timed": "chain"}.get(model.block)
    return {
        "model.layers, heads, width, window and target_window must be at least 1": min(sizes) >= 1,
        "model.hidden must not be negative, nor 0 for timed and evolved blocks": model.hidden
        >= (model.block in ("timed", "evolved")),
        "model.hidden must be even for random feed-forward": model.feedforward == "full"
        or model.hidden % 2 == 0,
        "model.patch, inducing and evolve must be at least 1": min(
            model.patch, model.inducing, model.evolve
        )
        >= 1,
        "model.width must be a multiple of model.heads": model.heads > 0
        and model.width % model.heads == 0,
        "model.head_width must not be negative, and 0 but for encoders and images": (
            model.head_width >= 0 and (not model.head_width or family in ("encoder", "image"))
        ),
        "model.T must be above 0": model.T > 0,
        "model.dropout and embed_dropout must be in [0, 1)": 0 <= model.dropout < 1
        and 0 <= model.embed_dropout < 1,
        "model.attention_dropout and activation_dropout must be in [0, 1)": (
            0 <= model.attention_dropout < 1 and 0 <= model.activation_dropout < 1
        ),
        "model.reach must not be negative, and 0 but for encoders, taggers and translators of "
        "blocks with a projection": model.reach == 0
        or (
            model.reach > 0
            and family in ("encoder", "tagger", "translator")
            and model.block in ("transformer", "runge-kutta")
            and model.project
            and not model.head_width
        ),
        'model.final_norm "pooled" and head_layers need model.family "encoder" or "image"': (
            family in ("encoder", "image")
            or (model.final_norm != "pooled" and not model.head_layers)
        ),
        "model.head_layers must not be negative": model.head_layers >= 0,
        # Of listops it may stay: that recipe is an encoder's, and trains a tagger too.
        'model.pool "max" needs model.family "encoder" or "image"': (
            model.pool != "max" or family in ("encoder", "image")
        ),
        'model.tied needs model.family "decoder" or "translator"': (
            not model.tied or model.family in ("decoder", "translator")
        ),
        'model.attention_dropout must be 0 for a set, and where model.block is "timed"': (
            not model.attention_dropout or not (family == "set" or model.block == "timed")
        ),
        "model.activation_dropout must be 0 for a set, and for timed and evolved blocks": (
            not model.activation_dropout
            or not (family == "set" or model.block in ("timed", "evolved"))
        ),
        'model.dropout must be 0 where model.block is "timed", but for encoders and images, whose '
        "head has it": not model.dropout
        or model.block != "timed"
        or family in ("encoder", "image"),
        'model.initial "scaled" must not be used with model.depth "chain" or model.block '
        '"runge-kutta", whose blocks it leaves as they are': model.initial != "scaled"
        or not (model.depth == "chain" or model.block == "runge-kutta"),
        "model.activation, project, bias and positions must be left out for a set": family != "set"
        or (
            model.activation == "gelu"
            and model.project
            and model.bias
            and model.positions == "learned"
        ),
        'model.function needs model.block "runge-kutta", hidden units, and a scheme that does not '
        "look back": model.function == "block"
        or (
            model.block == "runge-kutta"
            and model.hidden > 0
            and (model.function == "halves" or model.scheme in _SINGLE_STEP)
        ),
        'model.function needs model.scheme_in_decoder "false" for a translator': (
            model.function == "block" or family != "translator" or not model.scheme_in_decoder
        ),
        f'model.family must be "{family}" for data.kind "{data.kind}"': model.family == family
        or (data.kind == "listops" and model.family == "tagger"),
        f'model.depth must be "{depth}" for model.block "{model.block}"': depth
        in (None, model.depth),
        'model.pool must be "first" only for images and texts': model.pool != "first"
        or model.family in ("image", "encoder"),
        'model.block must not be "timed" for a translator': model.block != "timed"
        or model.family != "translator",
        'model.block must be "transformer" for a set': model.block == "transformer"
        or model.family != "set",
        'data.validation needs data.kind "text" or "pairs"; a table has data.test': (
            not data.validation or data.kind in ("text", "pairs")
        ),
        "data.held_out must be in (0, 1)": 0 < data.held_out < 1,
        "data.pad_id must not be negative": data.pad_id >= 0,
        "data.longest must be at least 1 and data.rows at least 20": not made
        or ((data.longest >= 1 or data.kind == "logic") and data.rows >= 20),
        "data.givens must be the fewest and the most, below the cells of data.side": (
            len(data.givens) == 2 and 1 <= data.givens[0] <= data.givens[1] < cells
        ),
        "data.rounds must be from 0 to 6": 0 <= data.rounds <= 6,
        f"model.window must be at least {cells} for puzzles of data.side {data.side}": (
            data.kind != "logic" or model.window >= cells
        ),
        'data.tokenizer must be "chars" for logic': data.kind != "logic"
        or data.tokenizer == "chars",
        f"data.longest must be at most {LONGEST_PARITY} for parity: every string of bits is made": (
            data.kind != "parity" or data.longest <= LONGEST_PARITY
        ),
        "data.vocabulary must be at least 3": data.vocabulary >= 3,
        "data.shortest must be from 0 to data.longest": 0 <= data.shortest <= data.longest,
        "data.nesting must be from 0 to a third of data.longest, and 0 with data.shortest": (
            0 <= data.nesting <= data.longest / 3 and not (data.nesting and data.shortest)
        ),
        "data.head + data.tail must not exceed model.window": min(data.head, data.tail) >= 0
        and data.head + data.tail <= model.window,
        'data.head and tail need model.family "encoder": others read the first model.window '
        "tokens of a text": model.family == "encoder" or not (data.head or data.tail),
        "data.languages must be two": len(data.languages) == 2,
        "data.shift must not be negative": data.shift >= 0,
        'data.shift, flip, mean and std need data.kind "images"': data.kind == "images"
        or not (data.shift or data.flip or data.mean or data.std),
        'data.tokenizer_file needs data.kind "stream"': not data.tokenizer_file
        or data.kind == "stream",
        f'data.train and test name files that data.kind "{data.kind}" does not read': not (
            data.train or data.test
        )
        or data.kind not in ("stream", *_MADE),
        'data.text must be one column for data.kind "tags"': data.kind != "tags"
        or len(data.text) == 1,
        'data.shortest and nesting need data.kind "listops", data.rounds "logic"': (
            (data.kind == "listops" or not (data.shortest or data.nesting))
            and (data.kind == "logic" or not data.rounds)
        ),
    }


def _depth_rules(model: ModelConfig, steps: StepsConfig, optim: OptimConfig) -> dict[str, bool]:
    adaptive = steps.solver == "adaptive"
    return {
        'model.depth "chain" needs model.block "timed", or "transformer" but for '
        "translators": model.depth != "chain"
        or model.block == "timed"
        or (model.block == "transformer" and model.family != "translator"),
        'model.final_norm "inside" needs model.block "transformer", and no model.depth "chain"': (
            model.final_norm != "inside"
            or (model.block == "transformer" and model.depth != "chain")
        ),
        'model.conditioned and timed need model.depth "ode"': model.depth == "ode"
        or not (model.conditioned or model.timed),
        "model.conditioned and timed must not both be on: in either dial one of them is constant "
        "or follows from the other": not (model.conditioned and model.timed),
        'model.timed must be off for a translator, and where model.block is "timed"': (
            not model.timed or (model.family != "translator" and model.block != "timed")
        ),
        'steps.jump needs model.depth "ode" and steps.solver "fixed"': not steps.jump
        or (model.depth == "ode" and not adaptive),
        'steps.solver "adaptive" needs model.depth "ode" or "chain"': not adaptive
        or model.depth != "discrete",
        'steps.checkpoint and model.conditioned or timed need steps.solver "fixed"': not adaptive
        or not (steps.checkpoint or model.conditioned or model.timed),
        'optim.token_dropout needs model.family "encoder"': not optim.token_dropout
        or model.family == "encoder",
        # The solver takes noise for curvature, and its steps become as small as they can.
        'steps.solver "adaptive" needs model.dropout 0 and optim.precision "fp32"': not adaptive
        or (
            model.dropout == model.attention_dropout == model.activation_dropout == 0
            and optim.precision == "fp32"
        ),
    }


def _dial_rules(model: ModelConfig, steps: StepsConfig) -> dict[str, bool]:
    ode = model.depth == "ode"
    counts = sorted({*steps.short, steps.full})
    exits = sorted(set(steps.exits))
    return {
        'model.velocity "residual", inject, prelude and coda need model.depth "ode"': ode
        or (model.velocity == "block" and not (model.inject or model.prelude or model.coda)),
        "model.inject, prelude and coda must be off for a translator": model.family != "translator"
        or not (model.inject or model.prelude or model.coda),
        "model.prelude and coda must be from 0 up, and 0 for a set": min(model.prelude, model.coda)
        >= 0
        and (model.family != "set" or not (model.prelude or model.coda)),
        'steps.dial "time" needs model.depth "ode", steps.solver "fixed" and no steps.jump (an '
        "earlier answer is an exit)": steps.dial == "resolution"
        or (ode and steps.solver == "fixed" and not steps.jump),
        'steps.schedule "tail" needs steps.dial "time"': steps.schedule != "tail"
        or steps.dial == "time",
        'steps.exits needs steps.dial "time", a schedule other than sandwich, and a model that is '
        "not a translator": not steps.exits
        or (steps.dial == "time" and steps.schedule != "sandwich" and model.family != "translator"),
        "steps.exits must be ascending counts from 1 to below steps.full": list(steps.exits)
        == exits
        and all(1 <= count < steps.full for count in exits),
        "steps.exit_weights must be above 0, one for each of steps.exits and one for steps.full": (
            not steps.exit_weights
            or (len(steps.exit_weights) == len(exits) + 1 and min(steps.exit_weights) > 0)
        ),
        "steps.stages must be shares that sum to 1, one for each of steps.short and steps.full": (
            not steps.stages
            or (
                len(steps.stages) == len(counts)
                and min(steps.stages) >= 0
                and abs(sum(steps.stages) - 1) < 1e-6
            )
        ),
        'steps.stages is in place of grow: set steps.grow to 0, and a schedule of "any", "fixed" '
        'or "tail"': not steps.stages or (steps.grow == 0 and steps.schedule != "sandwich"),
        'steps.backprop must not be negative, and needs model.depth "ode", steps.solver "fixed" '
        "and no steps.jump": steps.backprop == 0
        or (steps.backprop > 0 and ode and steps.solver == "fixed" and not steps.jump),
    }


def _teacher_rules(teacher: TeacherConfig, data: DataConfig) -> dict[str, bool]:
    return {
        "teacher.states must be 0 for a translator, which has states of two kinds": (
            not teacher.states or data.kind != "pairs"
        ),
        "teacher.weight must be in [0, 1]": 0 <= teacher.weight <= 1,
        "teacher.temperature must be above 0": teacher.temperature > 0,
        "teacher.states must not be negative": teacher.states >= 0,
    }


def _training_rules(steps: StepsConfig, optim: OptimConfig, run: RunConfig) -> dict[str, bool]:
    return {
        "steps.full must be at least 1": steps.full >= 1,
        "steps.short must be counts from 1 to steps.full": all(
            1 <= count <= steps.full for count in steps.short
        ),
        "steps.short must not be empty with schedule any or sandwich": steps.schedule
        in ("fixed", "tail")
        or bool(steps.short),
        "steps.full_probability must be in [0, 1]": 0 <= steps.full_probability <= 1,
        "steps.grow and distil_from must be in [0, 1)": 0 <= steps.grow < 1
        and 0 <= steps.distil_from < 1,
        "steps.distil and jump must not be negative": min(steps.distil, steps.jump) >= 0,
        'steps.distil needs schedule "sandwich" or steps.exits': not steps.distil
        or steps.schedule == "sandwich"
        or bool(steps.exits),
        "steps.tolerance must be above 0": steps.tolerance > 0,
        "optim.iterations, batch and accumulate must be at least 1": min(
            optim.iterations, optim.batch, optim.accumulate
        )
        >= 1,
        "optim.epochs must not be negative": optim.epochs >= 0,
        "optim.endings must be from 0 to below optim.iterations": (
            0 <= optim.endings < optim.iterations
        ),
        "optim.lr and clip must be above 0 (a huge clip is none)": min(optim.lr, optim.clip) > 0,
        "optim.beta2 must be in [0, 1), and weight_decay not negative": 0 <= optim.beta2 < 1
        and optim.weight_decay >= 0,
        "optim.drops must be shares in (0, 1), ascending": all(0 < d < 1 for d in optim.drops)
        and list(optim.drops) == sorted(optim.drops),
        "optim.transport must not be negative": optim.transport >= 0,
        "optim.warmup and final_lr must not be negative": min(optim.warmup, optim.final_lr) >= 0,
        "optim.token_dropout and smoothing must be in [0, 1)": 0 <= optim.token_dropout < 1
        and 0 <= optim.smoothing < 1,
        "run.seed must be from 0 to 2147483647": 0 <= run.seed < 2**31,
        f"run.threads must be from 1 to {MOST_THREADS}, or 0 for as many as torch picks": (
            0 <= run.threads <= MOST_THREADS
        ),
        'optim.average must not be negative, and is for run.keep "last"': optim.average >= 0
        and (run.keep == "last" or not optim.average),
        'run.patience must not be negative, and needs run.keep "best"': run.patience >= 0
        and (run.keep == "best" or not run.patience),
        "run.checkpoint_every, evaluate_every and evaluate_batches must be at least 1": min(
            run.checkpoint_every, run.evaluate_every, run.evaluate_batches
        )
        >= 1,
    }


# Recipe files: TOML read into the settings; unknown keys and wrong types fail at once.


RECIPES = Path(__file__).parent / "recipes"
# What has characters as tokens unless it says otherwise.
_READ_BY_CHARACTER = ("text", "stdlib", "logic")
_MADE = ("parity", "listops", "logic", "stdlib")  # data that is made on the spot


# What `stepdial recipes` shows, in this order. A pattern takes the names that it matches and that
# no group above has.
GROUPS = {
    "Your own data": ("classifier", "tagger", "tagger-discrete", "text"),
    "Data made on the spot, nothing to download": (
        "parity",
        "listops",
        "listops-dial",
        "listops-dial-discrete",
        "logic",
        "logic-discrete",
        "stdlib",
    ),
    "Models of the zoo": ("sentiment", "topics", "shakespeare", "mnist-any"),
    "OT-Transformer: its experiments, made small, and the plain transformer beside each": (
        "n*gpt*",
        "gpt2-*",
        "mnist*",
        "cats-dogs*",
        "imdb*",
        "modelnet*",
        "multi30k*",
    ),
    "ODE Transformer": ("ode-transformer*",),
    "TransEvolve": ("transevolve*",),
    "N-ODE Transformer": ("n-ode-parity*",),
}
_SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z`-])")
_FILES = re.compile(r" \(--data [^)]*\)")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def grouped_recipes() -> dict[str, list[str]]:
    """The names of all recipes, in groups."""
    left = recipe_names()
    groups: dict[str, list[str]] = {}
    for title, patterns in GROUPS.items():
        found = [name for one in patterns for name in left if fnmatchcase(name, one)]
        groups[title] = found
        left = [name for name in left if name not in found]
    if left:
        groups["Others"] = left
    return groups


def about_recipe(name: str) -> str:
    """What a recipe trains, and how long that takes: sentences of the comment at its head."""
    lines = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    first, *others = _SENTENCE.split(" ".join(line.lstrip("# ") for line in head))
    times = [one for one in others if one.startswith("About ")][:1]
    return " ".join([_FILES.sub("", first), *times])


def needs_data(name: str) -> bool:
    """Whether a recipe is of no use without --data."""
    table = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    return table["data"]["kind"] not in (*_MADE, "stream")


def _meant(word: str, known: Collection[str]) -> str:
    """A question to add to a refusal of a word, if it is like one of those known."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def load_recipe(source: str, overrides: list[str] | None = None, data: str = "") -> Recipe:
    """A recipe by name or path, with `key=value` overrides and the data path applied."""
    path = Path(source) if source.endswith(".toml") else RECIPES / f"{source}.toml"
    if not path.is_file():
        if source.endswith(".toml"):
            raise RecipeError(f"there is no file {source}")
        raise RecipeError(
            f"there is no recipe {source!r}.{_meant(source, recipe_names())} `stepdial recipes` "
            "lists them; a recipe of your own is a path that ends in .toml"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    recipe = overridden(table, overrides or [], str(path))
    return data_at(recipe, data or recipe.data.path)


class Columns(NamedTuple):
    """What a table of one's own calls the columns of texts and labels; empty: as in training."""

    text: tuple[str, ...] = ()
    label: str = ""


AS_TRAINED = Columns()


def data_at(recipe: Recipe, path: str, columns: Columns = AS_TRAINED) -> Recipe:
    """The recipe with its data at a path, if one is given; refuses what would not be read."""
    if any(columns) and not (path and recipe.data.kind == "table"):
        raise RecipeError(
            "--text and --label name columns of --data FILE, a table of labelled texts"
        )
    if not path:
        return recipe
    if recipe.data.kind in _MADE:
        raise RecipeError(
            f'{recipe.name} makes its own data (data.kind is "{recipe.data.kind}") and would not '
            f"read {path}: leave that out; `stepdial train text` and `stepdial train classifier` "
            "take data of your own"
        )
    data = dataclasses.replace(recipe.data, path=path)
    if any(columns):  # another table, whose labels are those of the model
        text, label = columns.text or data.text, columns.label or data.label
        data = dataclasses.replace(data, text=text, label=label, values=(), test="")
    return dataclasses.replace(recipe, data=data)


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
            raise RecipeError(
                f"{where}: unknown key {prefix + key!r}.{_key_meant(prefix, key, names)} Known "
                f"here: {', '.join(sorted(names))}"
            )
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


def _key_meant(prefix: str, key: str, names: Collection[str]) -> str:
    """The key of this section that was meant, or the one of the same name in another section."""
    sections = {"data": DataConfig, "model": ModelConfig, "steps": StepsConfig}
    sections |= {"optim": OptimConfig, "run": RunConfig, "teacher": TeacherConfig}
    elsewhere = [
        f"{section}.{key}"
        for section, config in sections.items()
        if key in {field.name for field in dataclasses.fields(config)}
    ]
    if elsewhere and key not in names:
        return f" Did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(key, names, n=1)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint) or isinstance(value, float):  # 6.0 is no 6
            options = ", ".join(map(str, typing.get_args(hint)))
            raise RecipeError(f"{where} must be one of {options}, not {value!r}")
        return value
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, str) and inner is not str:
            raise RecipeError(f"{where} must be a list like [1, 2], not {value!r}")
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce(inner, item, where) for item in items)
    if origin is dict and isinstance(value, dict):
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
