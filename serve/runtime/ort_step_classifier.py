"""One rung of a classifier made of single steps on onnxruntime.

Knows states and logits; what the rows mean was checked before.
"""

from collections.abc import Iterator
from typing import final

import numpy as np

from serve.bundle import BundleError, Manifest
from serve.runtime.classifier_rows import check_rows
from serve.runtime.margins import ahead, present_positions
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import EarlyAnswers, FloatArray, RowArray

Beside = dict[str, FloatArray]  # what goes along with a state: its context, and its past


@final
class OrtStepClassifier:
    """Rows in, logits out, step by step: one label a row, or one a position."""

    def __init__(self, sessions: StepSessions, manifest: Manifest, steps: int) -> None:
        self._sessions = sessions
        self._manifest = manifest
        self._steps = steps
        self._name = sessions.embed.get_inputs()[0].name

    def run(self, rows: RowArray) -> FloatArray:
        for state, context in self._states(rows):
            last, beside = state, context
        return self._read(last, beside)

    def early(self, rows: RowArray, threshold: float) -> EarlyAnswers:
        self._check_jumps()
        x, beside = self._embed(rows)
        present = present_positions(rows, self._manifest)  # (B, N), of a tagger
        left = np.arange(len(x))  # (B,): the rows that go on
        evaluations = np.full(len(x), self._steps, dtype=np.int64)
        positions = () if present is None else present.shape[1:]
        shape = (len(x), *positions, len(self._manifest.labels or ()))
        logits = np.empty(shape, dtype=np.float32)
        for step in range(self._steps):
            y = self._step(step, x, beside)
            found = self._read(self._end(step, x, y), beside)  # (L, ..., C)
            sure = ahead(found, None if present is None else present[left]) >= threshold
            if step + 1 == self._steps:
                sure[:] = True
            logits[left[sure]], evaluations[left[sure]] = found[sure], step + 1
            if sure.all():
                break
            x, left = y[~sure], left[~sure]
            beside = {name: array[~sure] for name, array in beside.items()}
        return EarlyAnswers(logits, evaluations)

    def traced(self, rows: RowArray, threshold: float | None) -> EarlyAnswers:
        readouts = self._readouts(rows)  # (M, B, ..., C)
        evaluations = np.full(len(rows), self._steps, dtype=np.int64)
        if threshold is not None:
            self._check_jumps()
            sure = ahead(readouts, present_positions(rows, self._manifest)) >= threshold  # (M, B)
            sure[-1] = True
            evaluations = sure.argmax(axis=0) + 1
        logits = readouts[evaluations - 1, np.arange(len(rows))]
        return EarlyAnswers(logits, evaluations * self._sessions.stages, readouts)

    def jumps(self, rows: RowArray) -> FloatArray:
        """Logits (M, B, ..., C) after each evaluation; the last are the answer."""
        self._check_jumps()
        return self._readouts(rows)

    def _readouts(self, rows: RowArray) -> FloatArray:
        logits: list[FloatArray] = []
        states = self._states(rows)
        x, context = next(states)
        for step, (y, _) in enumerate(states):
            logits.append(self._read(self._end(step, x, y), context))
            x = y
        return np.stack(logits)

    def _end(self, step: int, x: FloatArray, y: FloatArray) -> FloatArray:
        """The state that is read out after a step from x to y.

        With the dial of time that is y. Otherwise as many steps as are left follow, all with this
        step's velocity, if the method has one.
        """
        left = self._steps - step
        if left == 1 or self._manifest.dial == "time" or self._manifest.method != "euler":
            return y
        return x + np.float32(left) * (y - x)

    def _check_jumps(self) -> None:
        if self._manifest.method != "euler":
            raise BundleError(
                f"{self._manifest.name} is integrated by {self._manifest.method}, whose states "
                "are no jumps; export it with --method euler"
            )

    def _states(self, rows: RowArray) -> Iterator[tuple[FloatArray, Beside]]:
        """The state before the first step and after each, with what stays beside it."""
        x, beside = self._embed(rows)
        yield x, beside
        for step in range(self._steps):
            x = self._step(step, x, beside)
            yield x, beside

    def _embed(self, rows: RowArray) -> tuple[FloatArray, Beside]:
        embed = self._sessions.embed
        names = [node.name for node in embed.get_outputs()]
        made = embed.run(names, {self._name: check_rows(rows, self._manifest)})
        beside: Beside = dict(zip(names, made, strict=True))
        x = beside.pop("x")
        if self._sessions.history:
            beside["previous"] = np.zeros_like(x)
        return x, beside

    def _step(self, step: int, x: FloatArray, beside: Beside) -> FloatArray:
        """The next state; with a method that looks back, its velocity is put beside it."""
        sessions = self._sessions
        told = {name: beside[name] for name in sessions.contexts}
        if sessions.history:
            told["previous"] = beside["previous"]
        times = sessions.times(step, self._steps, len(x))
        outputs = ["y", "v"] if sessions.history else ["y"]
        y, *v = sessions.step.run(outputs, {"x": x} | times | told)
        if v:
            beside["previous"] = v[0]
        state: FloatArray = y
        return state

    def _read(self, state: FloatArray, beside: Beside) -> FloatArray:
        seen = {name: beside[name] for name in self._sessions.head_contexts}
        logits: FloatArray = self._sessions.head.run(["logits"], {"x": state} | seen)[0]
        return logits  # (B, C), or (B, N, C)
