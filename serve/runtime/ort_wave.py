"""A row that runs ahead of itself on onnxruntime: positions at different steps share calls.

A position needs the keys and values of its own step only, which those before it, being further on,
have written. So what was drafted right is done already when it is confirmed, and what was drafted
wrong is written over. The caches of steps a lead apart are neighbours, so the positions are rows of
the same graph that a batch runs. Which token a position drafts is chosen elsewhere.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from serve.runtime.mixing import MOST_AHEAD, Crossed
from serve.runtime.ort_batch import OrtDecodeBatch
from serve.runtime.ort_binding import bind_input, bind_output
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import FloatArray


@final
class OrtWave:
    """Places of positions of one row, newest first, as the caches of their steps lie.

    A place without a token is between two that have one. What is computed there is read by nobody,
    and written where the position behind it will write.
    """

    def __init__(self, batch: OrtDecodeBatch, lead: int, calls: "WaveCalls") -> None:
        assert 0 < lead < batch.steps
        self.lead = lead
        self._batch = batch
        self._places: list[int | None] = []  # the tokens
        self._under_way = 0  # places with a token
        self._step = 0  # of the newest place; the next ones are a lead further each
        self._x: FloatArray = np.empty((0, 1, batch.width), dtype=np.float32)  # (P, 1, D)
        self._calls = calls

    @property
    def tokens(self) -> list[int]:
        return [token for token in reversed(self._places) if token is not None]

    @property
    def room(self) -> int:
        left = self._batch.max_tokens - self._batch.lengths[0]
        return min(MOST_AHEAD, left) - self._under_way

    def begin(self, token: int) -> None:
        assert self.room > 0, "too many positions"
        leads, more = divmod(self._step, self.lead) if self._places else (1, 0)
        assert leads > 0 and more == 0, "a position begins some leads later"
        past = self._batch.lengths[0] + self._under_way
        self._batch.reach(past + 1, self.lead)
        x = self._batch.state(token, past)  # (1, 1, D)
        self._x = np.concatenate([x] * leads + [self._x])
        self._places[:0] = [token] + [None] * (leads - 1)
        self._under_way += 1
        self._step = 0

    def cross(self) -> Crossed:
        batch, places = self._batch, self._places
        key = (batch.steps, self.lead, self._step, len(places))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(batch.sessions, *key, batch.width)
        if call.version != batch.version:
            call.bind(batch)
        call.run(self._x, batch.lengths[0], places)
        self._x = call.y.copy()  # another wave may come to this call before this one does
        self._step += 1
        drafts = self._step % self.lead == 0
        ends = self._step + (len(places) - 1) * self.lead == batch.steps
        if not drafts and not ends:
            return Crossed(None, None)
        logits = batch.read_off(call.jumped() if drafts else call.y[-1:])[::-1]
        last, rest = (logits[0], logits[1:]) if ends else (None, logits)
        if ends:
            batch.lengthen()
            places.pop()
            self._under_way -= 1
        if drafts and len(places) > self._under_way:
            known = [index for index, token in enumerate(reversed(places)) if token is not None]
            rest = rest[known]
        if ends:
            while places and places[-1] is None:
                places.pop()
            self._x = self._x[: len(places)]
        return Crossed(rest if drafts else None, last)

    def keep(self, count: int) -> None:
        while self._under_way > count or (self._places and self._places[0] is None):
            self._under_way -= self._places.pop(0) is not None
            self._step += self.lead
        self._x = self._x[len(self._x) - len(self._places) :]


@final
class _Call:
    """So many places, the newest of which stands at this step; for one batch after another."""

    def __init__(
        self, sessions: StepSessions, steps: int, lead: int, step: int, count: int, width: int
    ) -> None:
        self.version = -1  # of the batch whose caches are bound
        self.x: FloatArray = np.empty((count, 1, width), dtype=np.float32)  # (P, 1, D)
        self.y = np.empty_like(self.x)  # a step later; the next run of this call overwrites it
        self._seqlens: npt.NDArray[np.int32] = np.empty(count, dtype=np.int32)
        self._total: npt.NDArray[np.int32] = np.empty((), dtype=np.int32)
        # Positions between the first and each place, where every place has one.
        self._behind = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._stands = [step + lead * older for older in range(count)]
        # Steps to the end with this one: as many times a jump goes along the velocity.
        left = [steps - stand for stand in self._stands]
        self._left: FloatArray = np.array(left, dtype=np.float32)[:, None, None]  # (P, 1, 1)
        self._ends = left[-1] == 1  # the first position
        self._grid = sessions.grid_steps is not None
        told = [sessions.times(stand, steps, 1) for stand in self._stands]
        self._times = {name: np.concatenate([each[name] for each in told]) for name in told[0]}
        self._session = sessions.step
        self._binding = self._session.io_binding()
        for name, array in self._times.items():
            bind_input(self._binding, name, array)
        bind_input(self._binding, "x", self.x)
        bind_input(self._binding, "seqlens", self._seqlens)
        bind_input(self._binding, "total", self._total)
        bind_output(self._binding, "y", self.y)

    def bind(self, batch: OrtDecodeBatch) -> None:
        """To the caches of the only row of a batch, which holds them until its next version."""
        caches = batch.along(self._stands[0], len(self._stands))
        for name, array in zip(batch.names, caches, strict=True):
            bind_input(self._binding, name, array)
            bind_output(self._binding, f"{name}_out", array)
        self.version = batch.version

    def run(self, x: FloatArray, past: int, places: Sequence[int | None]) -> None:
        """Take the states (P, 1, D) a step further; the row has so many positions behind it."""
        self.x[:] = x
        if None in places:
            position = past
            for index in range(len(places) - 1, -1, -1):
                self._seqlens[index] = position
                position += places[index] is not None
        else:
            np.add(self._behind, past, out=self._seqlens)
            position = past + len(places)
        self._total[()] = position
        self._session.run_with_iobinding(self._binding)

    def jumped(self) -> FloatArray:
        """The states (P, 1, D) that drafts are read off: where each would be at the end.

        With the dial of resolution, had its last velocity stayed the same; with that of time an
        earlier answer is that of an earlier end.
        """
        if self._grid:
            return self.y
        states: FloatArray = self.y - self.x
        states *= self._left
        states += self.x
        if self._ends:  # no jump: the state itself, to the last bit
            states[-1] = self.y[-1]
        return states


WaveCalls = dict[tuple[int, int, int, int], _Call]  # of steps, lead, first step and places
