"""The work of one classify request: its rows, and their scores as they come in.

It deliberately knows neither which rows of other requests ran beside them, nor the labels' names.
"""

from collections.abc import Sequence

import numpy as np

from serve.engine.events import ClassifiedEvent, Deliver, Span
from serve.engine.sampling import FloatArray, softmax
from serve.errors import ModelFailure

Row = list[int] | FloatArray  # the tokens of a text; or pixels (C, H, W), or points (N, dimensions)


class Classification:
    """Rows to classify, for one caller."""

    def __init__(self, rows: Sequence[Row], deliver: Deliver) -> None:
        self.rows = rows
        self.deliver = deliver
        self._scores: list[tuple[float, ...]] = [()] * len(rows)
        self._steps = [0] * len(rows)
        self._evaluations = [0] * len(rows)

    def accept(self, row: int, logits: FloatArray, steps: int, evaluations: int) -> None:
        """Take a row's logits (C,), its rung and its cost; ModelFailure if they are no numbers."""
        if not np.isfinite(logits).all():
            raise ModelFailure("the model's scores for this input are not finite numbers")
        self._scores[row] = tuple(softmax(logits).tolist())
        self._steps[row] = steps
        self._evaluations[row] = evaluations

    def finished(self, span: Span) -> ClassifiedEvent:
        """The answer, once every row has its scores."""
        assert all(self._scores), "a row without scores"
        return ClassifiedEvent(
            tuple(self._scores), tuple(self._steps), tuple(self._evaluations), span
        )
