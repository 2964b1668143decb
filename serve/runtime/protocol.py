"""What the engine asks of a model: its rungs, batches and shared calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from serve.bundle import Bundle, ImageInput, Manifest, PointsInput

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
RowArray = IntArray | FloatArray
Row = list[int] | FloatArray  # the tokens of a text; or pixels (C, H, W), or points (N, dimensions)
CacheArray = FloatArray | npt.NDArray[np.int8]


class WindowFullError(ValueError):
    """A row has max_tokens cached positions: add it again with a shorter prompt to go on."""


class Classifier(Protocol):
    """One rung of a classifier."""

    def run(self, rows: RowArray) -> FloatArray:
        """Logits (B, C) of what the model takes; (B, N, C) of one that labels each position.

        Tokens (B, N), each row padded on its right with pad_id; or pixels (B, C, H, W), already
        normalised; or points (B, N, dimensions), already centred and scaled.
        """
        ...


class EarlyAnswers(NamedTuple):
    """Answers to rows that may have stopped before the last step."""

    logits: FloatArray  # (B, C), or (B, N, C)
    evaluations: IntArray  # (B,): of the velocity, that each took
    readouts: FloatArray | None = None  # (M, B, ..., C): after each step, if that was asked


class Unrolled(Protocol):
    """A whole rung as one graph without caches."""

    def forward(self, rows: RowArray) -> FloatArray:
        """Logits of rows: (B, C) of a classifier, (B, N, C) or (B, S, V) at every position."""
        ...


class StepClassifier(Classifier, Protocol):
    """A rung of a classifier that is run step by step."""

    def early(self, rows: RowArray, threshold: float) -> EarlyAnswers:
        """Each row's answer at the first jump that is ahead by the threshold, or its own at last.

        A row is ahead by what its largest logit has over the second; one with a label at each
        position, by the least of these. With the dial of time the jump is the readout there.
        """
        ...

    def traced(self, rows: RowArray, threshold: float | None) -> EarlyAnswers:
        """The same answers, or those of all steps, with the readouts after each step.

        Every row takes all steps: those that it would have been spared are in `readouts` too.
        """
        ...

    def jumps(self, rows: RowArray) -> FloatArray:
        """Logits (M, B, ..., C): the answer if each evaluation went straight to the end.

        The last are the rung's own. With the dial of time, the readout after each evaluation.
        BundleError for a method that has no jumps.
        """
        ...


class Prefill(Protocol):
    """A prompt on its way through a rung, in pieces, with caches of its own.

    Where the pieces end follows from the prompt and the rung alone.
    """

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        ...

    @property
    def positions(self) -> int:
        """Positions that the row has once all is read; of a translation, those of the answer."""
        ...

    def advance(self) -> FloatArray | None:
        """Run the next piece; after the last one the logits (V,) for the token that follows."""
        ...


class DecodeBatch(Protocol):
    """Rows of ONE rung that decode together, with what they keep; hides how that lies in memory.

    Rows are numbered from 0 in the order they were added. No method changes any row when it
    raises. The arrays returned belong to the caller.
    """

    @property
    def lengths(self) -> list[int]:
        """Positions of each row; of a translation, those of the answer."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory held now, beside the tokens."""
        ...

    def read(self, tokens: IntArray, positions: int = 0) -> Prefill:
        """Begin to read a prompt or a source (S,), beside the rows.

        It may come to have so many positions: room for them now saves copies later.
        """
        ...

    def join(self, prefill: Prefill) -> None:
        """Append as the last row what this batch has read to its end."""
        ...

    def add(self, tokens: IntArray) -> FloatArray:
        """Read a prompt or a source (S,), append it as the last row, return its logits (V,)."""
        ...

    def step(self, tokens: IntArray) -> FloatArray:
        """One token a row (B,) to its logits (B, V); every row grows by one position."""
        ...

    def extend(self, row: int, tokens: IntArray) -> FloatArray:
        """Several tokens (S,) behind one row to the logits (S, V) after each of them."""
        ...

    def remove(self, row: int) -> None:
        """Drop a row; the last row takes its number."""
        ...


class SteppedBatch(DecodeBatch, Protocol):
    """A batch that also goes from step to step; on the way no row joins or leaves."""

    def begin(self, tokens: IntArray) -> None:
        """One token a row (B,): now the rows stand before the first step."""
        ...

    def end(self) -> FloatArray:
        """Logits (B, V) of rows that are behind the last step; every row grows by one position."""
        ...


class Batches(Protocol):
    """One rung of a model that writes token by token."""

    def open_batch(self) -> DecodeBatch:
        """A batch without rows, which holds no memory."""
        ...

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        """The most memory that a batch which had so many rows, so long, holds."""
        ...


class Decoder(Batches, Protocol):
    """One rung of a decoder."""

    def forward(self, tokens: IntArray) -> FloatArray:
        """Logits (B, S, V) at every position of tokens (B, S); keeps no cache."""
        ...


class RunningTranslation(Protocol):
    """A source that has been read, and whose answers are compared: see beam search."""

    @property
    def nbytes(self) -> int:
        """Memory held."""
        ...

    def follow(self, prefixes: IntArray) -> FloatArray:
        """Logits (B, V) for the token after each prefix (B, N), bos included."""
        ...


class Translator(Batches, Protocol):
    """One rung of a translator. The positions that `bytes_for` counts are those of the source."""

    def read(self, source: IntArray) -> RunningTranslation:
        """Run the encoder on a source (S,)."""
        ...

    def forward(self, source: IntArray, tokens: IntArray) -> FloatArray:
        """Logits (B, N, V) at every position of tokens (B, N), given sources (B, S)."""
        ...


# What the engine asks of a decoder's rungs that run at the same time.


MOST_AHEAD = 8  # positions of one row under way at once


class StepOutput(NamedTuple):
    """What a step of a wave brought to light."""

    drafts: FloatArray | None  # (P, V): of the token behind each position that is under way still
    last: FloatArray | None  # (V,): of the token behind the first position, which is done


class Speculation(Protocol):
    """The only row of a batch, running ahead of itself.

    Positions that follow each other stand at different steps. Each was begun with a token that the
    one before it drafted by a jump; later jumps draft better. It is lost when the batch is used
    otherwise.
    """

    @property
    def lead(self) -> int:
        """After every so many steps the positions draft what follows them."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Those that the positions under way were begun with, first position first."""
        ...

    @property
    def room(self) -> int:
        """Positions that may still be begun."""
        ...

    def begin(self, token: int) -> None:
        """One position more, behind those that are under way; only where these draft."""
        ...

    def advance(self) -> StepOutput:
        """One step of every position; a first position that is done is under way no more."""
        ...

    def keep(self, count: int) -> None:
        """Give up all positions but so many first ones."""
        ...


class Segment(NamedTuple):
    """How far a batch goes."""

    batch: DecodeBatch
    steps: int
    tokens: IntArray | None  # (B,): what its rows begin with; None: they are under way


# Logits (B, V) of a leg that ends a token; what it threw, after which its batch is lost.
Outcome = FloatArray | Exception | None


class Mix(Protocol):
    """Takes batches of several rungs of one model further, in one call or at the same time."""

    @property
    def most_batches(self) -> int:
        """How many may share a call."""
        ...

    @property
    def sides(self) -> int:
        """How many may go abreast, each on a thread of its own."""
        ...

    @property
    def can_speculate(self) -> bool:
        """Whether there are waves."""
        ...

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        """Give each row of these batches its token (B,): now they stand before the first step."""
        ...

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        """Logits (B, V) of each of these batches, which are behind their last step."""
        ...

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        """One step of each, which have all begun and not come to their last step."""
        ...

    def parallel(self, sides: Sequence[Sequence[Segment]]) -> list[list[Outcome]]:
        """Each side leg after leg, all sides at once."""
        ...

    def speculation(self, batch: DecodeBatch, lead: int) -> Speculation:
        """Let the only row of a batch run ahead; MOST_AHEAD positions at most are under way."""
        ...


# What the engine asks of a runtime when a call takes too long.


class Interruptible(Protocol):
    """A model whose calls can be ended from outside."""

    @property
    def opening(self) -> bool:
        """Whether the call that runs is opening a graph, which may take long."""
        ...

    def interrupt(self) -> None:
        """From any thread: let the call that runs throw as soon as it can, and all after it."""
        ...

    def resume(self) -> None:
        """What was interrupted is over: calls run again."""
        ...


# What the engine asks of an opened bundle.


class Model(Interruptible, Protocol):
    """A bundle opened for running. One thread at a time may use it."""

    @property
    def bundle(self) -> Bundle:
        """What was opened."""
        ...

    @property
    def most_parts(self) -> int:
        """How many parts the rows of a classification may run in, side by side."""
        ...

    @property
    def single_steps(self) -> bool:
        """Whether a classification can be run step by step here."""
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
        """What mixes the batches of this model, which are SteppedBatch then; None: nothing does."""
        ...

    def warm_up(self) -> None:
        """Open every rung and run it once, so that no request pays for that."""
        ...

    def close(self) -> None:
        """Give the memory back at once. No call may follow."""
        ...


class OpenedModel(Model, Protocol):
    """All graphs of an opened bundle, each to be run on its own."""

    def unrolled(self, steps: int) -> Unrolled:
        """The one graph of the rung that other runtimes run; not of a translator."""
        ...


# Where a bundle is run: the device, and the folder of native engines if there is one.


Device = Literal["cpu", "cuda", "tensorrt"]


@dataclass(frozen=True, slots=True)
class Place:
    """The CPU, unless something else is said."""

    device: Device = "cpu"
    allow_cpu_fallback: bool = False
    engines: Path | None = None  # native engines, which need no device of onnxruntime

    @property
    def runs_single_steps(self) -> bool:
        """Whether the graphs of one step run there; elsewhere each rung is one whole graph.

        Attention with caches has CUDA kernels for 16-bit floats only, and its caches are float32;
        and a graph of one step would come back to the host between any two steps.
        """
        return self.device == "cpu" and self.engines is None


# Checks of token arrays before a runtime gets them.


def check_tokens(tokens: RowArray, dimensions: int, vocab_size: int) -> IntArray:
    """The tokens, contiguous; ValueError unless there are some and all are in the vocabulary."""
    if tokens.ndim != dimensions or tokens.dtype != np.int64 or tokens.size == 0:
        raise ValueError(
            f"tokens must be a non-empty int64 array of {dimensions} dimensions, not "
            f"{tokens.dtype} {tokens.shape}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return np.ascontiguousarray(tokens, dtype=np.int64)


# Checks of what a classifier takes: padded tokens, pixels or points.


def check_rows(rows: RowArray, manifest: Manifest) -> RowArray:
    """The rows, contiguous; ValueError for what the manifest does not promise to take."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return _check_floats(rows, (channels, height, width))
        case PointsInput(max_points=max_points, dimensions=dimensions):
            rows = _check_floats(rows, (rows.shape[1] if rows.ndim > 1 else 0, dimensions))
            if rows.shape[1] > max_points:
                raise ValueError(f"{rows.shape[1]} points are more than {max_points}")
            return rows
        case _:
            return _check_texts(rows, manifest)


def _check_texts(rows: RowArray, manifest: Manifest) -> IntArray:
    tokenizer, max_tokens = manifest.text_tokenizer, manifest.text_input.max_tokens
    tokens = check_tokens(rows, 2, tokenizer.vocab_size)  # (B, N)
    if tokens.shape[1] > max_tokens:
        raise ValueError(
            f"{tokens.shape[1]} tokens a row are more than max_tokens ({max_tokens}); "
            "truncate first"
        )
    if (tokens[:, 0] == tokenizer.pad_id).any():
        raise ValueError("a row begins with padding; each has a real token, pads to its right")
    return tokens


def _check_floats(rows: RowArray, shape: tuple[int, ...]) -> FloatArray:
    """Rows (B, *shape) of finite numbers, contiguous."""
    if rows.dtype != np.float32 or rows.shape[1:] != shape or rows.size == 0:
        raise ValueError(
            f"rows must be a non-empty float32 array of shape (batch, "
            f"{', '.join(map(str, shape))}), not {rows.dtype} {rows.shape}"
        )
    floats: FloatArray = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(floats).all():
        raise ValueError("rows hold a number that is not finite")
    return floats


# The largest inputs that a manifest promises: a graph that takes them takes any.


def largest_row(manifest: Manifest) -> RowArray:
    """One row of what a classifier takes, without its batch."""
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return np.zeros((channels, height, width), dtype=np.float32)
        case PointsInput(max_points=max_points, dimensions=dimensions):
            return np.zeros((max_points, dimensions), dtype=np.float32)
        case _:
            return largest_tokens(manifest)


def largest_tokens(manifest: Manifest) -> IntArray:
    """The longest row of the greatest token."""
    spec = manifest.text_tokenizer
    token = spec.vocab_size - 1
    if token == spec.pad_id:
        token = max(0, token - 1)
    return np.full(manifest.text_input.max_tokens, token, dtype=np.int64)


def largest_in_words(manifest: Manifest) -> str:
    """What `largest_row` is, for messages."""
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
