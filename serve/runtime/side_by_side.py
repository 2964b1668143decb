"""Rungs of a classifier whose rows run in parts, side by side.

Knows rows and answers; neither graphs nor who asked.
"""

from typing import final

import numpy as np

from serve.runtime.ort_classifier import OrtClassifier
from serve.runtime.ort_step_classifier import OrtStepClassifier
from serve.runtime.parts import Parts
from serve.runtime.protocol import EarlyAnswers, FloatArray, RowArray


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
        logits, evaluations = zip(*found, strict=True)
        return EarlyAnswers(np.concatenate(logits), np.concatenate(evaluations))

    def jumps(self, rows: RowArray) -> FloatArray:
        return np.concatenate(self._parts.each(self._steps.jumps, rows), axis=1)
