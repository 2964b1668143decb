"""Rows of one call in parts that run side by side.

A session's own threads meet again after every product, often within microseconds, and wait for
each other; parts of a batch meet once. They are not equal: a thread whose core has other things to
do leaves the last ones to the others. No answer depends on what shares its part. Knows rows and
answers; neither graphs nor who asked.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TypeVar, final

import numpy as np

from serve.parts import cut_rows
from serve.runtime.ort_classifier import OrtClassifier
from serve.runtime.ort_step_classifier import OrtStepClassifier
from serve.runtime.protocol import EarlyAnswers, FloatArray, RowArray
from serve.runtime.threads import Threads

AnswerT = TypeVar("AnswerT")


@final
class Parts:
    """The rows of a call, shared among threads that the rungs of one model take turns with."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def each(self, call: Callable[[RowArray], AnswerT], rows: RowArray) -> list[AnswerT]:
        """The answers to the parts in their order; raises when all have ended, if one did."""
        sizes = cut_rows(len(rows), self._threads.most) if rows.ndim else [1]
        if len(sizes) == 1:
            return [call(rows)]
        bounds = pairwise(accumulate(sizes, initial=0))
        return self._threads.each(call, [rows[low:high] for low, high in bounds])


class SideBySide:
    """One rung of a classifier."""

    def __init__(self, classifier: OrtClassifier | OrtStepClassifier, parts: Parts) -> None:
        self._classifier = classifier
        self._parts = parts

    def run(self, rows: RowArray) -> FloatArray:
        return np.concatenate(self._parts.each(self._classifier.run, rows))


@final
class StepsSideBySide(SideBySide):
    """One that is made of single steps."""

    def __init__(self, steps: OrtStepClassifier, parts: Parts) -> None:
        super().__init__(steps, parts)
        self._steps = steps

    def early(self, rows: RowArray, threshold: float) -> EarlyAnswers:
        def early(part: RowArray) -> EarlyAnswers:
            return self._steps.early(part, threshold)

        found = self._parts.each(early, rows)
        logits, evaluations, _ = zip(*found, strict=True)
        return EarlyAnswers(np.concatenate(logits), np.concatenate(evaluations))

    def traced(self, rows: RowArray, threshold: float | None) -> EarlyAnswers:
        def traced(part: RowArray) -> EarlyAnswers:
            return self._steps.traced(part, threshold)

        logits, evaluations, readouts = zip(*self._parts.each(traced, rows), strict=True)
        return EarlyAnswers(
            np.concatenate(logits), np.concatenate(evaluations), np.concatenate(readouts, axis=1)
        )

    def jumps(self, rows: RowArray) -> FloatArray:
        return np.concatenate(self._parts.each(self._steps.jumps, rows), axis=1)
