"""The work of one classify request: its rows, and their scores as they come in.

It deliberately knows neither which rows of other requests ran beside them, nor the labels' names.
"""

from collections.abc import Sequence

import numpy as np

from serve.engine.events import ClassifiedEvent, Deliver, Span
from serve.engine.sampling import softmax
from serve.errors import ModelFailure
from serve.runtime.protocol import FloatArray, Row

_NO_NUMBERS = "the model's scores for this input are not finite numbers"

Scores = tuple[float, ...]  # of every label


def scores_of(logits: FloatArray) -> list[Scores | ModelFailure]:
    """The scores of each row of logits (B, C), or that they are no numbers."""
    finite = np.logical_and.reduce(np.isfinite(logits), axis=1)  # (B,)
    with np.errstate(invalid="ignore"):
        scores: list[list[float]] = softmax(logits).tolist()
    return [
        tuple(row) if good else ModelFailure(_NO_NUMBERS)
        for row, good in zip(scores, finite.tolist(), strict=True)
    ]


class Classification:
    """Rows to classify, for one caller."""

    def __init__(self, rows: Sequence[Row], deliver: Deliver) -> None:
        self.rows = rows
        self.deliver = deliver
        self._scores: list[Scores] = [()] * len(rows)
        self._steps = [0] * len(rows)
        self._evaluations = [0] * len(rows)

    def accept(self, row: int, scores: Scores, steps: int, evaluations: int) -> None:
        """Take a row's scores, its rung and its cost."""
        self._scores[row] = scores
        self._steps[row] = steps
        self._evaluations[row] = evaluations

    def finished(self, span: Span) -> ClassifiedEvent:
        """The answer, once every row has its scores."""
        assert all(self._scores), "a row without scores"
        return ClassifiedEvent(
            tuple(self._scores), tuple(self._steps), tuple(self._evaluations), span
        )
