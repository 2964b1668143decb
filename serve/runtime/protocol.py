"""What the engine needs of a model: its rungs, batches, shared calls and speculation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from serve.bundle import Bundle, BundleError, ImageInput, Manifest, PointsInput, Rung, Task

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
RowArray = IntArray | FloatArray
Row = list[int] | FloatArray  # tokens of a text, pixels (C, H, W), or points (N, dimensions)
CacheArray = FloatArray | npt.NDArray[np.float16] | npt.NDArray[np.int8]


class WindowFullError(ValueError):
    """A row has max_tokens cached positions: add it again with a shorter prompt to go on."""


class Classifier(Protocol):
    """One rung of a classifier."""

    def run(self, rows: RowArray) -> FloatArray:
        """Logits (B, C) of rows; (B, N, C) for a label at each position.

        Rows are tokens (B, N), padded on the right with pad_id; or normalised pixels (B, C, H, W);
        or centred and scaled points (B, N, dimensions).
        """
        ...

    def embed(self, rows: RowArray) -> FloatArray:
        """The pooled states (B, D) of tokens (B, N); only where the manifest has an embedding."""
        ...


class EarlyAnswers(NamedTuple):
    """Answers to rows, some of which may have stopped before the last step."""

    logits: FloatArray  # (B, C), or (B, N, C)
    steps: IntArray  # (B,): of each row's answer
    evaluations: IntArray  # (B,): of velocities, for each row
    readouts: FloatArray | None = None  # (M, B, ..., C): after each step, if asked for


class Unrolled(Protocol):
    """A whole rung as one graph without caches."""

    def forward(self, rows: RowArray) -> FloatArray:
        """Logits of rows: (B, C) of a classifier, (B, N, C) or (B, S, V) at every position."""
        ...


class StepClassifier(Classifier, Protocol):
    """A classifier rung that can be run step by step."""

    def early(self, rows: RowArray, threshold: float) -> EarlyAnswers:
        """Each row's answer at the first jump whose margin reaches the threshold, or at the end.

        The margin is the largest logit less the second; for a label at each position, the smallest
        of these. With the dial of time the jump is the readout itself.
        """
        ...

    def traced(self, rows: RowArray, threshold: float | None) -> EarlyAnswers:
        """The same answers, with or without a threshold, and the readouts after each step.

        Every row takes all steps, even if it stops early.
        """
        ...

    def jumps(self, rows: RowArray) -> FloatArray:
        """Logits (M, B, ..., C): the answer if each evaluation went straight to the end.

        The last are the rung's own. With the dial of time, the readout after each evaluation.
        BundleError for a method without jumps.
        """
        ...


class Prefill(Protocol):
    """The prefill of a prompt, in pieces, with caches of its own.

    Where the pieces end depends on the prompt and the rung alone.
    """

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        ...

    @property
    def positions(self) -> int:
        """Positions of the row after prefill; for a translation, those of the answer."""
        ...

    def advance(self) -> FloatArray | None:
        """Run the next piece; after the last one the logits (V,) for the next token."""
        ...


class DecodeBatch(Protocol):
    """Rows of one rung that decode together, with their caches.

    Rows are numbered from 0 in the order they were added. A method that raises changes no row.
    Returned arrays belong to the caller.
    """

    @property
    def lengths(self) -> list[int]:
        """Positions of each row; for a translation, those of the answer."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory held now, besides the tokens."""
        ...

    def read(self, tokens: IntArray, positions: int = 0) -> Prefill:
        """Begin the prefill of a prompt or a source (S,), beside the rows.

        The row may grow to this many positions; room for them now saves copies later.
        """
        ...

    def join(self, prefill: Prefill) -> None:
        """Append a finished prefill of this batch as the last row."""
        ...

    def add(self, tokens: IntArray) -> FloatArray:
        """Prefill a prompt or a source (S,), append it as the last row, return its logits (V,)."""
        ...

    def step(self, tokens: IntArray) -> FloatArray:
        """One token a row (B,) to logits (B, V); every row grows by one position."""
        ...

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its number."""
        ...


class Batches(Protocol):
    """One rung of a model that generates token by token."""

    def open_batch(self) -> DecodeBatch:
        """A batch without rows; it holds no memory."""
        ...

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        """The most memory that a batch of this size may hold."""
        ...


class Decoder(Batches, Protocol):
    """One rung of a decoder."""

    def forward(self, tokens: IntArray) -> FloatArray:
        """Logits (B, S, V) at every position of tokens (B, S), without a cache."""
        ...


class RunningTranslation(Protocol):
    """A source that has been read, for beam search."""

    @property
    def nbytes(self) -> int:
        """Memory held."""
        ...

    def follow(self, prefixes: IntArray) -> FloatArray:
        """Logits (B, V) for the token after each prefix (B, N), bos included."""
        ...


class Translator(Batches, Protocol):
    """One rung of a translator. `bytes_for` counts positions of the source."""

    def read(self, source: IntArray) -> RunningTranslation:
        """Run the encoder on a source (S,)."""
        ...

    def forward(self, source: IntArray, tokens: IntArray) -> FloatArray:
        """Logits (B, N, V) at every position of tokens (B, N), given sources (B, S)."""
        ...


MOST_AHEAD = 8  # positions of one row under way at once


class StepOutput(NamedTuple):
    """What a step of a speculation has produced."""

    drafts: FloatArray | None  # (P, V): of the token after each position still under way
    last: FloatArray | None  # (V,): of the token after the first position, which is finished


class Speculation(Protocol):
    """The only row of a batch with several positions under way, at different steps.

    Each position begins with a token that the one before it drafted by a jump; later jumps draft
    better. It ends when the batch is used in another way.
    """

    @property
    def lead(self) -> int:
        """Positions draft their next token every this many steps."""
        ...

    @property
    def tokens(self) -> list[int]:
        """The input tokens of the positions under way, first position first."""
        ...

    @property
    def room(self) -> int:
        """Positions that may still begin."""
        ...

    def begin(self, token: int) -> None:
        """Begin a position behind those under way; only after a step that drafts."""
        ...

    def advance(self) -> StepOutput:
        """One step of every position; a finished first position is no longer under way."""
        ...

    def keep(self, count: int) -> None:
        """Give up all but the first `count` positions."""
        ...


class Mix(Protocol):
    """Runs batches of several rungs of one model in shared calls."""

    @property
    def most_batches(self) -> int:
        """How many batches may share a call."""
        ...

    @property
    def can_speculate(self) -> bool:
        """Whether a row can speculate."""
        ...

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        """Give each row of these batches its token (B,): they are before the first step now."""
        ...

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        """Logits (B, V) of each of these batches, after their last step."""
        ...

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        """One step of each batch; all are between their first and their last step."""
        ...

    def speculation(self, batch: DecodeBatch, lead: int) -> Speculation:
        """Speculation of the only row of a batch, with at most MOST_AHEAD positions under way."""
        ...


class Model(Protocol):
    """A bundle opened for running. Used by one thread at a time, but for `interrupt`."""

    @property
    def bundle(self) -> Bundle:
        """What was opened."""
        ...

    @property
    def most_parts(self) -> int:
        """How many parts the rows of a classification may be split into."""
        ...

    @property
    def single_steps(self) -> bool:
        """Whether classifications can run step by step."""
        ...

    def classifier(self, steps: int) -> Classifier:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def step_classifier(self, steps: int) -> StepClassifier:
        """The rung, run step by step; BundleError if the bundle has no graphs of one step."""
        ...

    def decoder(self, steps: int) -> Decoder:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def translator(self, steps: int) -> Translator:
        """The rung of that many steps; BundleError if the ladder or the task has none."""
        ...

    def mix(self) -> Mix | None:
        """Runs batches of this model together; None if it cannot."""
        ...

    def warm_up(self) -> None:
        """Open every rung and run it once, so that no request has to wait for that."""
        ...

    @property
    def opening(self) -> bool:
        """Whether the running call is opening a graph, which may take long."""
        ...

    def interrupt(self) -> None:
        """From any thread: make the running call and all later ones throw as soon as they can."""
        ...

    def resume(self) -> None:
        """Let calls run again."""
        ...

    def close(self) -> None:
        """Free the memory at once. No call may follow."""
        ...


class OpenedModel(Model, Protocol):
    """An opened bundle whose graphs can each be run on their own."""

    def unrolled(self, steps: int) -> Unrolled:
        """The rung as the one graph that other runtimes run; not for translators."""
        ...


DeviceName = Literal["cpu", "cuda", "tensorrt"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a bundle runs: the CPU by default."""

    name: DeviceName = "cpu"
    allow_cpu_fallback: bool = False
    engines: Path | None = None  # native engines, which need no device of onnxruntime
    number: int = 0  # of the GPU
    memory_mb: int | None = None  # the most of a GPU that each session of onnxruntime may take

    def runs_single_steps(self, manifest: Manifest) -> bool:
        """Whether a classifier runs step by step there, so that rows can stop early.

        Engines of one step are built where there are thresholds to stop at.
        """
        if not manifest.labelled or manifest.step is None:
            return False
        return self.engines is None or manifest.calibration is not None

    def keeps_caches(self, manifest: Manifest) -> bool:
        """Whether a decoder runs with KV caches there.

        Attention with caches has CUDA kernels for 16-bit floats only; engines have it written out.
        """
        if not manifest.keeps_caches:
            return False
        return self.name == "cpu" or self.engines is not None or manifest.cache == "kv_fp16"


CPU = Device()


# The largest inputs that a manifest allows, for warm-up and checks.


def largest_row(manifest: Manifest) -> RowArray:
    """One row of a classifier's input."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return np.zeros((channels, height, width), dtype=np.float32)
        case PointsInput(max_points=max_points, dimensions=dimensions):
            return np.zeros((max_points, dimensions), dtype=np.float32)
        case _:
            return largest_tokens(manifest)


def largest_tokens(manifest: Manifest) -> IntArray:
    """The longest row, of the greatest token."""
    spec = manifest.text_tokenizer
    token = spec.vocab_size - 1
    if token == spec.pad_id:
        token = max(0, token - 1)
    return np.full(manifest.text_input.max_tokens, token, dtype=np.int64)


def largest_in_words(manifest: Manifest) -> str:
    """`largest_row` in words, for messages."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return f"an image of {channels} x {height} x {width}"
        case PointsInput(max_points=max_points, dimensions=dimensions):
            return f"{max_points} points of {dimensions} dimensions"
        case _:
            return (
                f"{manifest.text_input.max_tokens} tokens of a vocabulary of "
                f"{manifest.text_tokenizer.vocab_size}"
            )


def run_largest(model: Model, steps: int) -> None:
    """Open a rung and run it once on its largest input, for warm-up."""
    manifest = model.bundle.manifest
    if manifest.labelled:
        rows = largest_row(manifest)[None]
        model.classifier(steps).run(rows)
        if model.single_steps and steps == manifest.full_steps:
            model.step_classifier(steps).run(rows)  # early answers and traces use it
        return
    tokens = largest_tokens(manifest)
    if manifest.task == "translate":
        answer = np.full((1, manifest.target_max_tokens or 1), tokens[0])  # (1, N)
        model.translator(steps).read(tokens).follow(answer)
        return
    batch = model.decoder(steps).open_batch()
    if manifest.keeps_caches and len(tokens) > 1:
        batch.add(tokens[:-1])
        batch.step(tokens[-1:])
    else:
        batch.add(tokens)


def rung_for(manifest: Manifest, steps: int, *tasks: Task) -> Rung:
    """The rung of this many steps; BundleError unless the model has it and one of these tasks."""
    if manifest.task not in tasks:
        raise BundleError(
            f"{manifest.name} is a bundle of the task {manifest.task}, which cannot {tasks[0]}"
        )
    return manifest.rung(steps)
