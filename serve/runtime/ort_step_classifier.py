"""One rung of a classifier made of single steps on onnxruntime.

Knows states and logits; what the rows mean was checked before.
"""

from collections.abc import Iterator
from typing import final

import numpy as np

from serve.bundle import BundleError, Manifest
from serve.runtime.classifier_rows import check_rows
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import EarlyAnswers, FloatArray, RowArray

Beside = dict[str, FloatArray]  # what goes along with a state: its context, and its past


@final
class OrtStepClassifier:
    """Rows in, a row of logits each out, step by step."""

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
        left = np.arange(len(x))  # (B,): the rows that go on
        evaluations = np.full(len(x), self._steps, dtype=np.int64)
        logits = np.empty((len(x), len(self._manifest.labels or ())), dtype=np.float32)
        for step in range(self._steps):
            y = self._step(step, x, beside)
            after = self._steps - step  # steps from x to the end
            end = y if after == 1 else x + np.float32(after) * (y - x)
            found = self._read(end, beside)  # (L, C)
            top = np.partition(found, -2, axis=-1)
            sure = top[:, -1] - top[:, -2] >= threshold
            if after == 1:
                sure[:] = True
            logits[left[sure]], evaluations[left[sure]] = found[sure], step + 1
            if sure.all():
                break
            x, left = y[~sure], left[~sure]
            beside = {name: array[~sure] for name, array in beside.items()}
        return EarlyAnswers(logits, evaluations)

    def jumps(self, rows: RowArray) -> FloatArray:
        """Logits (M, B, C): straight to the end after each evaluation; the last are the answer."""
        self._check_jumps()
        logits: list[FloatArray] = []
        states = self._states(rows)
        before, context = next(states)
        for left, (state, _) in zip(range(self._steps, 0, -1), states, strict=True):
            # As many steps as are left, all with this step's velocity.
            end = state if left == 1 else before + np.float32(left) * (state - before)
            logits.append(self._read(end, context))
            before = state
        return np.stack(logits)  # (M, B, C)

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
        return logits  # (B, C)
