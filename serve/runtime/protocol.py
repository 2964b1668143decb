"""What the engine asks of a rung of a model.

Knows tokens, logits and rows; nothing of sessions, devices or the layout of caches.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

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


class Reading(Protocol):
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

    def read(self, tokens: IntArray, positions: int = 0) -> Reading:
        """Begin to read a prompt or a source (S,), beside the rows.

        It may come to have so many positions: room for them now saves copies later.
        """
        ...

    def join(self, reading: Reading) -> None:
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


class Translation(Protocol):
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

    def read(self, source: IntArray) -> Translation:
        """Run the encoder on a source (S,)."""
        ...

    def forward(self, source: IntArray, tokens: IntArray) -> FloatArray:
        """Logits (B, N, V) at every position of tokens (B, N), given sources (B, S)."""
        ...
