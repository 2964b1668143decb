"""One rung of a classifier made of single steps on onnxruntime.

Knows states and logits; what the rows mean was checked before.
"""

from collections.abc import Iterator
from typing import final

import numpy as np

from serve.bundle import BundleError, Manifest
from serve.runtime.classifier_rows import check_rows
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import FloatArray, RowArray


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

    def jumps(self, rows: RowArray) -> FloatArray:
        """Logits (M, B, C): straight to the end after each evaluation; the last are the answer."""
        if self._manifest.method != "euler":
            raise BundleError(
                f"{self._manifest.name} is integrated by {self._manifest.method}, whose states "
                "are no jumps; export it with --method euler"
            )
        logits: list[FloatArray] = []
        states = self._states(rows)
        before, context = next(states)
        for left, (state, _) in zip(range(self._steps, 0, -1), states, strict=True):
            # As many steps as are left, all with this step's velocity.
            end = state if left == 1 else before + np.float32(left) * (state - before)
            logits.append(self._read(end, context))
            before = state
        return np.stack(logits)  # (M, B, C)

    def _states(self, rows: RowArray) -> Iterator[tuple[FloatArray, dict[str, FloatArray]]]:
        """The state before the first step and after each, with what stays beside it."""
        sessions = self._sessions
        rows = check_rows(rows, self._manifest)
        names = [node.name for node in sessions.embed.get_outputs()]
        made = dict(zip(names, sessions.embed.run(names, {self._name: rows}), strict=True))
        x = made.pop("x")
        yield x, made
        told = {name: made[name] for name in sessions.contexts}
        if sessions.history:
            told["previous"] = np.zeros_like(x)
        outputs = ["y", "v"] if sessions.history else ["y"]
        for step in range(self._steps):
            times = sessions.times(step, self._steps, len(x))
            x, *v = sessions.step.run(outputs, {"x": x} | times | told)
            if v:
                told["previous"] = v[0]
            yield x, made

    def _read(self, state: FloatArray, context: dict[str, FloatArray]) -> FloatArray:
        seen = {name: context[name] for name in self._sessions.head_contexts}
        logits: FloatArray = self._sessions.head.run(["logits"], {"x": state} | seen)[0]
        return logits  # (B, C)
