"""A few early answers are run again at full steps, so that the promise kept can be watched.

The promise of `max_disagreement` is about data like the calibration rows; this counts how often it
held for the rows that really came. Knows what was answered; when there is time to spare is for the
engine to say.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.engine.classification import answer_of
from serve.metrics import Metrics
from serve.runtime.protocol import FloatArray, Row
from serve.scheduler.job import LaneKey

_MOST_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class RecheckCall:
    """Run a row that was answered early, at all steps."""

    promised: LaneKey
    row: Row
    labels: tuple[int, ...]  # the answer that was given: one, or one a position

    @property
    def lane(self) -> LaneKey:
        return self.promised._replace(threshold=None, traced=False)


class Rechecks:
    """Rows to run again, chosen at random. Used by the engine's thread alone."""

    def __init__(self, share: float, promise: Callable[[LaneKey], float], metrics: Metrics) -> None:
        """`promise` is the disagreement that a lane allows."""
        self._share = share
        self._promise = promise
        self._metrics = metrics
        self._random = random.Random()
        self._waiting: deque[RecheckCall] = deque()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def offer(self, promised: LaneKey, row: Row, logits: FloatArray, early: bool) -> None:
        """A row of a lane with a threshold was answered with logits, after all steps or not.

        Logits (C,), or (N, C) of a label at each position, which differ if any of those does.

        While many wait none is taken: which rows those are has nothing to do with what is in them.
        """
        if len(self._waiting) == _MOST_ROWS or self._random.random() >= self._share:
            return
        if early:
            self._waiting.append(RecheckCall(promised, row, answer_of(logits, row)))
        else:
            self._count(promised, agrees=True)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._waiting = deque(one for one in self._waiting if one.promised.model != model)

    def take(self) -> RecheckCall:
        """The one that has waited longest."""
        return self._waiting.popleft()

    def found(self, call: RecheckCall, logits: FloatArray) -> None:
        """What all steps answer: logits (C,), or (N, C)."""
        self._count(call.promised, agrees=answer_of(logits, call.row) == call.labels)

    def _count(self, promised: LaneKey, agrees: bool) -> None:
        labels = promised.name, str(self._promise(promised))
        self._metrics.rechecked.labels(*labels).inc()
        self._metrics.disagreed.labels(*labels).inc(0 if agrees else 1)
