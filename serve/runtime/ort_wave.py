"""A row that runs ahead of itself on onnxruntime: positions at different steps share calls.

A position needs the keys and values of its own step only, which those before it, being further on,
have written. So what was drafted right is done already when it is confirmed, and what was drafted
wrong is written over. The caches of steps a lead apart are neighbours, so the positions are rows of
the same graph that a batch runs. Which token a position drafts is chosen elsewhere.
"""

from typing import final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.runtime.ort_batch import OrtDecodeBatch
from serve.runtime.protocol import MOST_AHEAD, Crossed, FloatArray

_KEPT_CALLS = 64


@final
class OrtWave:
    """Positions of one row. They are kept newest first, as the caches of their steps lie."""

    def __init__(self, batch: OrtDecodeBatch, lead: int) -> None:
        assert 0 < lead < batch.steps
        self.lead = lead
        self._batch = batch
        self._tokens: list[int] = []
        self._step = 0  # of the newest position; the next ones are a lead further each
        self._x: FloatArray = np.empty((0, 1, batch.width), dtype=np.float32)  # (P, 1, D)
        self._calls: dict[tuple[int, int, int], _Call] = {}

    @property
    def tokens(self) -> list[int]:
        return self._tokens[::-1]

    @property
    def room(self) -> int:
        under_way = len(self._tokens)
        left = self._batch.max_tokens - self._batch.lengths[0] - under_way
        return min(MOST_AHEAD - under_way, left)

    def begin(self, token: int) -> None:
        assert self.room > 0, "too many positions"
        assert not self._tokens or self._step == self.lead, "a position begins a lead later"
        past = self._batch.lengths[0] + len(self._tokens)
        self._batch.reach(past + 1, self.lead)
        stand = self._batch.embed(np.array([token]), np.array([past], dtype=np.int32))
        self._x = np.concatenate([stand.x, self._x])
        self._tokens.insert(0, token)
        self._step = 0

    def cross(self) -> Crossed:
        batch, count = self._batch, len(self._tokens)
        key = (batch.version, self._step, count)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _KEPT_CALLS:
                self._calls.clear()
            call = self._calls[key] = _Call(batch, self._step, count, self.lead)
        y = call.run(self._x, batch.lengths[0])
        self._step += 1
        states: list[FloatArray] = []
        drafts = self._step == self.lead
        if drafts:
            left = batch.steps - self.lead + 1  # steps to the end, the last one included
            states.append(self._x[:1] + np.float32(left) * (y[:1] - self._x[:1]))
        ends = self._step + (count - 1) * self.lead == batch.steps
        if ends:
            states.append(y[-1:])
            y = y[:-1]
            self._tokens.pop()
            batch.lengthen()
        self._x = y
        if not states:
            return Crossed(None, None)
        logits = batch.read_off(np.concatenate(states))
        return Crossed(logits[0] if drafts else None, logits[-1] if ends else None)

    def drop(self) -> None:
        self._tokens.clear()
        self._x = self._x[:0]
        self._step = 0


@final
class _Call:
    """So many positions, the newest of which stands at this step, bound once."""

    def __init__(self, batch: OrtDecodeBatch, step: int, count: int, lead: int) -> None:
        sessions = batch.sessions
        self._session = sessions.step
        self._binding = sessions.step.io_binding()
        self._kept: list[ort.OrtValue] = []
        self._x = np.empty((count, 1, batch.width), dtype=np.float32)  # (P, 1, D)
        self._y = np.empty_like(self._x)
        self._seqlens: npt.NDArray[np.int32] = np.empty(count, dtype=np.int32)
        self._total: npt.NDArray[np.int32] = np.empty((), dtype=np.int32)
        self._behind = np.arange(count - 1, -1, -1, dtype=np.int32)  # the first position
        self._give("x", self._x)
        self._give("y", self._y, out=True)
        self._give("seqlens", self._seqlens)
        self._give("total", self._total)
        stands = [step + lead * older for older in range(count)]
        told = [sessions.times(stand, batch.steps, 1) for stand in stands]
        for name in told[0]:
            self._give(name, np.concatenate([each[name] for each in told]))
        for name, array in zip(batch.names, batch.along(step, count), strict=True):
            self._give(name, array)
            self._give(f"{name}_out", array, out=True)

    def run(self, x: FloatArray, past: int) -> FloatArray:
        """The states (P, 1, D) a step later; the row has so many positions behind it."""
        self._x[:] = x
        self._seqlens[:] = past + self._behind
        self._total[()] = past + len(x)
        self._session.run_with_iobinding(self._binding)
        return self._y.copy()

    def _give(self, name: str, array: npt.NDArray[np.generic], out: bool = False) -> None:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._kept.append(value)
        bind = self._binding.bind_ortvalue_output if out else self._binding.bind_ortvalue_input
        bind(name, value)
