"""A classifier rung on onnxruntime, whole or step by step, and rows split over threads."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar, final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.bundle import BundleError, Manifest
from serve.parts import cut_rows
from serve.runtime.device import Array
from serve.runtime.protocol import EarlyAnswers, FloatArray, IntArray, RowArray
from serve.runtime.session import StepSessions, check_rows

# The margin of an answer is how far its largest logit is ahead of the second; for a label at each
# position, the smallest of the row. Padding does not count.


Present = npt.NDArray[np.bool_]  # (B, N): positions that are not padding


def present_positions(rows: RowArray, manifest: Manifest) -> Present | None:
    """Where rows have tokens, for models that label positions; None for others."""
    if manifest.task != "tag":
        return None
    present: Present = rows != manifest.text_tokenizer.pad_id
    return present


def ahead(logits: FloatArray, present: Present | None) -> FloatArray:
    """Margins (..., B) of logits (..., B, C), or (..., B, N, C) of rows with these positions.

    -inf where a logit is NaN.
    """
    top = np.partition(logits, -2, axis=-1)[..., -2:]  # a NaN counts as the largest
    with np.errstate(invalid="ignore"):
        margins: FloatArray = top[..., 1] - top[..., 0]
    margins[np.isnan(margins)] = -np.inf
    if present is None:
        return margins
    least: FloatArray = np.where(present, margins, np.inf).min(axis=-1)
    return least


Beside = dict[str, Array]  # the step's context, and the last velocity


@final
class OrtStepClassifier:
    """A rung run step by step: one label a row, or one a position.

    States stay in the memory of the sessions; only rows and logits cross to the host.
    """

    def __init__(self, sessions: StepSessions, manifest: Manifest, steps: int) -> None:
        self._sessions = sessions
        self._memory = sessions.memory
        self._manifest = manifest
        self._steps = steps
        self._name = sessions.embed.get_inputs()[0].name

    def run(self, rows: RowArray) -> FloatArray:
        return self._run("logits", rows)

    def embed(self, rows: RowArray) -> FloatArray:
        return self._run("embedding", rows)

    def early(self, rows: RowArray, threshold: float) -> EarlyAnswers:
        self._check_jumps()
        x, beside = self._embed(rows)
        present = present_positions(rows, self._manifest)  # (B, N), of a tagger
        left = np.arange(len(rows))  # (B,): rows that go on
        steps = np.full(len(rows), self._steps, dtype=np.int64)
        positions = () if present is None else present.shape[1:]
        shape = (len(rows), *positions, len(self._manifest.labels or ()))
        logits = np.empty(shape, dtype=np.float32)
        for step in range(self._steps):
            end, y = self._ended(step, x, beside)
            found = self._read(end, beside)  # (L, ..., C)
            sure = ahead(found, None if present is None else present[left]) >= threshold
            if step + 1 == self._steps:
                sure[:] = True
            logits[left[sure]], steps[left[sure]] = found[sure], step + 1
            if sure.all():
                break
            left = left[~sure]
            if sure.any():
                rest = np.flatnonzero(~sure)
                if y is None:
                    x = self._memory.pick(x, rest)
                else:
                    y = self._memory.pick(y, rest)
                beside = {name: self._memory.pick(array, rest) for name, array in beside.items()}
            x = self._step(step, x, beside) if y is None else y
        return EarlyAnswers(logits, steps, self._spent(steps))

    def traced(self, rows: RowArray, threshold: float | None) -> EarlyAnswers:
        readouts = self._readouts(rows)  # (M, B, ..., C)
        steps = np.full(len(rows), self._steps, dtype=np.int64)
        if threshold is not None:
            self._check_jumps()
            sure = ahead(readouts, present_positions(rows, self._manifest)) >= threshold  # (M, B)
            sure[-1] = True
            steps = sure.argmax(axis=0) + 1
        logits = readouts[steps - 1, np.arange(len(rows))]
        return EarlyAnswers(logits, steps, self._spent(steps), readouts)

    def jumps(self, rows: RowArray) -> FloatArray:
        self._check_jumps()
        return self._readouts(rows)

    def _run(self, output: str, rows: RowArray) -> FloatArray:
        x, beside = self._embed(rows)
        for step in range(self._steps - 1):
            x = self._step(step, x, beside)
        end, _ = self._ended(self._steps - 1, x, beside)
        return self._read(end, beside, output)

    def _readouts(self, rows: RowArray) -> FloatArray:
        logits: list[FloatArray] = []
        x, beside = self._embed(rows)
        for step in range(self._steps):
            end, y = self._ended(step, x, beside)
            logits.append(self._read(end, beside))
            if step + 1 < self._steps:
                x = self._step(step, x, beside) if y is None else y
        return np.stack(logits)

    def _ended(self, step: int, x: Array, beside: Beside) -> tuple[Array, Array | None]:
        """The state to read out after a step from x, and that to go on from.

        With the dial of time they are the same; where an answer ends with a step of its own there
        is none to go on from yet. Otherwise what is read out is the jump to the end along this
        step's velocity, if the method allows it.
        """
        if self._sessions.ends_apart(step):
            return self._step(step, x, beside, ending=True), None
        y = self._step(step, x, beside)
        left = self._steps - step
        if left == 1 or self._manifest.dial == "time" or self._manifest.method != "euler":
            return y, y
        return self._memory.jumped(x, y, np.array(left, dtype=np.float32)), y

    def _spent(self, steps: IntArray) -> IntArray:
        """Evaluations of velocities for answers that were read out after each of their steps."""
        if self._sessions.endings:  # each step but the last is taken again, to go on
            return 2 * steps - 1
        return steps * self._sessions.stages

    def _check_jumps(self) -> None:
        if self._manifest.method != "euler":
            raise BundleError(
                f"{self._manifest.name} is integrated by {self._manifest.method}, whose states "
                "are no jumps; export it with --method euler"
            )

    def _embed(self, rows: RowArray) -> tuple[Array, Beside]:
        embed = self._sessions.embed
        names = [node.name for node in embed.get_outputs()]
        made = self._memory.run(embed, names, {self._name: check_rows(rows, self._manifest)})
        beside: Beside = dict(zip(names, made, strict=True))
        x = beside.pop("x")
        if self._sessions.history:
            beside["previous"] = x  # without weight at the first step
        return x, beside

    def _step(self, step: int, x: Array, beside: Beside, ending: bool = False) -> Array:
        """The next state; for methods that need it, the velocity is put beside it."""
        sessions = self._sessions
        context = {name: beside[name] for name in sessions.contexts}
        if sessions.history:
            context["previous"] = beside["previous"]
        times = sessions.times(step, self._steps, x.shape[0], ending)
        outputs = ["y", "v"] if sessions.history else ["y"]
        y, *v = self._memory.run(sessions.step, outputs, {"x": x, **times, **context})
        if v:
            beside["previous"] = v[0]
        return y

    def _read(self, state: Array, beside: Beside, output: str = "logits") -> FloatArray:
        seen = {name: beside[name] for name in self._sessions.head_contexts}
        (found,) = self._memory.run(self._sessions.head, [output], {"x": state, **seen})
        logits: FloatArray = self._memory.read(found)  # type: ignore[assignment]  # float32
        return logits  # (B, C), or (B, N, C)


@final
class OrtClassifier:
    """A rung as one graph: rows in, logits out."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest) -> None:
        self._session = session
        self._manifest = manifest
        self._name = session.get_inputs()[0].name

    def run(self, rows: RowArray) -> FloatArray:
        return self._run("logits", rows)  # (B, C)

    def embed(self, rows: RowArray) -> FloatArray:
        return self._run("embedding", rows)  # (B, D)

    def _run(self, output: str, rows: RowArray) -> FloatArray:
        rows = check_rows(rows, self._manifest)
        found: FloatArray = self._session.run([output], {self._name: rows})[0]
        return found

    def forward(self, rows: RowArray) -> FloatArray:
        """The same; whole graphs of every task have this name."""
        return self.run(rows)


AnswerT = TypeVar("AnswerT")


# A session's own threads synchronise after every matrix product, often within microseconds; parts
# of a batch synchronise once. Parts are of unequal size, so that a thread on a busy core leaves the
# last ones to others. Answers do not depend on the split.


@final
class RowSplitter:
    """Splits the rows of a call over threads, the calling one included; started when needed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._others: ThreadPoolExecutor | None = None

    def each(self, call: Callable[[RowArray], AnswerT], rows: RowArray) -> list[AnswerT]:
        """The answers of the parts in order; each thread takes the next part when it is free.

        If a call raises, raises after all that had begun have ended.
        """
        sizes = cut_rows(len(rows), self.most) if rows.ndim else [1]
        if len(sizes) == 1:
            return [call(rows)]
        if self._others is None:
            self._others = ThreadPoolExecutor(self.most - 1, "rows")
        bounds = pairwise(accumulate(sizes, initial=0))
        waiting = iter([*enumerate(rows[low:high] for low, high in bounds)])
        answers: dict[int, AnswerT] = {}

        def work() -> None:
            try:
                for place, part in waiting:
                    answers[place] = call(part)
            finally:
                deque(waiting, maxlen=0)  # nothing is left, unless a call failed

        others: list[Future[None]] = []
        try:
            for _ in range(min(self.most, len(sizes)) - 1):
                others.append(self._others.submit(work))  # may fail to start a thread
            work()
        finally:
            deque(waiting, maxlen=0)
            for other in others:
                other.exception()  # waits for its end
        for other in others:
            other.result()
        return [answers[place] for place in range(len(sizes))]

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown(wait=False)
            self._others = None


class ParallelClassifier:
    """A rung of a classifier, its rows split over threads."""

    def __init__(
        self, classifier: OrtClassifier | OrtStepClassifier, splitter: RowSplitter
    ) -> None:
        self._classifier = classifier
        self._splitter = splitter

    def run(self, rows: RowArray) -> FloatArray:
        return np.concatenate(self._splitter.each(self._classifier.run, rows))

    def embed(self, rows: RowArray) -> FloatArray:
        return np.concatenate(self._splitter.each(self._classifier.embed, rows))


@final
class ParallelStepClassifier(ParallelClassifier):
    """A rung that can run step by step, its rows split over threads."""

    def __init__(self, steps: OrtStepClassifier, splitter: RowSplitter) -> None:
        super().__init__(steps, splitter)
        self._steps = steps

    def early(self, rows: RowArray, threshold: float) -> EarlyAnswers:
        return self._answers(partial(self._steps.early, threshold=threshold), rows)

    def traced(self, rows: RowArray, threshold: float | None) -> EarlyAnswers:
        return self._answers(partial(self._steps.traced, threshold=threshold), rows)

    def jumps(self, rows: RowArray) -> FloatArray:
        return np.concatenate(self._splitter.each(self._steps.jumps, rows), axis=1)

    def _answers(self, call: Callable[[RowArray], EarlyAnswers], rows: RowArray) -> EarlyAnswers:
        logits, steps, spent, readouts = zip(*self._splitter.each(call, rows), strict=True)
        return EarlyAnswers(
            np.concatenate(logits),
            np.concatenate(steps),
            np.concatenate(spent),
            None if readouts[0] is None else np.concatenate(readouts, axis=1),
        )
