"""The work of one classify request: its rows, and their labels as they come in.

Nothing here knows which rows of other requests ran beside them, or what the labels are called.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from serve.engine.events import ClassifiedEvent, Deliver, Labelled, Scores, Span, Tags
from serve.engine.sampling import softmax
from serve.errors import ModelFailure
from serve.runtime import EarlyAnswers
from serve.runtime.protocol import FloatArray, Row

_NO_NUMBERS = "the model's scores for this input are not finite numbers"


def labelled_rows(found: EarlyAnswers, rows: Sequence[Row]) -> list[Labelled | ModelFailure]:
    """The labels of each row, or that its logits are no numbers."""
    logits = found.logits
    if found.readouts is None and logits.ndim == 2:
        return [
            one if isinstance(one, ModelFailure) else Labelled(one) for one in scores_of(logits)
        ]
    answered: list[Labelled | ModelFailure] = []
    for place, row in enumerate(rows):
        read = _read(logits[place], len(row))
        readouts: Iterable[FloatArray] = () if found.readouts is None else found.readouts[:, place]
        steps = [_read(one, len(row)) for one in readouts]
        if read is None or None in steps:
            answered.append(ModelFailure(_NO_NUMBERS))
        else:
            answered.append(Labelled(read, tuple(one for one in steps if one is not None)))
    return answered


def scores_of(logits: FloatArray) -> list[Scores | ModelFailure]:
    """The scores of each row of logits (B, C), or that they are no numbers."""
    finite = np.logical_and.reduce(np.isfinite(logits), axis=1)  # (B,)
    with np.errstate(invalid="ignore"):
        scores: list[list[float]] = softmax(logits).tolist()
    return [
        tuple(row) if good else ModelFailure(_NO_NUMBERS)
        for row, good in zip(scores, finite.tolist(), strict=True)
    ]


def answer_of(logits: FloatArray, row: Row) -> tuple[int, ...]:
    """The likeliest label of a row's logits (C,), or of each of its positions' (N, C)."""
    if logits.ndim == 1:
        return (int(logits.argmax()),)
    return tuple(logits[: len(row)].argmax(axis=-1).tolist())


def _read(logits: FloatArray, positions: int) -> Scores | Tags | None:
    """What logits (C,) or (N, C) say, of which so many positions are no padding."""
    kept = logits if logits.ndim == 1 else logits[:positions]
    if not np.isfinite(kept).all():
        return None
    scores = softmax(kept)
    if logits.ndim == 1:
        return tuple(scores.tolist())
    return Tags(tuple(kept.argmax(axis=-1).tolist()), tuple(scores.max(axis=-1).tolist()))


class Classification:
    """Rows to classify, for one caller."""

    def __init__(self, rows: Sequence[Row], deliver: Deliver) -> None:
        self.rows = rows
        self.deliver = deliver
        self._labelled: list[Labelled | None] = [None] * len(rows)
        self._steps = [0] * len(rows)
        self._evaluations = [0] * len(rows)

    def accept(self, row: int, labelled: Labelled, steps: int, evaluations: int) -> None:
        """Take a row's answer, its rung and its cost."""
        self._labelled[row] = labelled
        self._steps[row] = steps
        self._evaluations[row] = evaluations

    def finished(self, span: Span) -> ClassifiedEvent:
        """The answer, once every row has its own."""
        rows = tuple(one for one in self._labelled if one is not None)
        assert len(rows) == len(self._labelled), "a row without an answer"
        return ClassifiedEvent(rows, tuple(self._steps), tuple(self._evaluations), span)
