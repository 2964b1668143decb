"""Several rungs of one decoder in shared calls, and speculation."""

import logging
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from serve.bundle import Manifest
from serve.runtime.cache import can_map_shared, map_adjacent
from serve.runtime.decoder import OrtDecodeBatch, StepState
from serve.runtime.device import HOST, Array
from serve.runtime.protocol import (
    MOST_AHEAD,
    CacheArray,
    DecodeBatch,
    FloatArray,
    IntArray,
    Speculation,
    StepOutput,
)
from serve.runtime.session import (
    InterruptibleSession,
    StepSessions,
    cache_names,
)

# Speculation: one row has several positions under way at different steps, in one call. A position
# needs the keys and values of its own step only, and earlier positions, which are further on, have
# written those. A right draft is finished when it is confirmed; a wrong one is overwritten. The
# caches of steps a lead apart lie next to each other, so the positions are rows of the batch's own
# graph. The engine chooses the draft tokens.


@final
class OrtSpeculation:
    """The positions of one row that are under way, newest first, as their caches lie in memory.

    A place without a token lies between two that have one. What is computed there is never read,
    and the position behind it overwrites it.
    """

    def __init__(self, batch: OrtDecodeBatch, lead: int, calls: "SpeculationCalls") -> None:
        assert 0 < lead < batch.steps
        self.lead = lead
        self._batch = batch
        self._places: list[int | None] = []  # their tokens
        self._under_way = 0  # places with a token
        self._step = 0  # of the newest place; the others are a lead further each
        self._x: Array | None = None  # (P, 1, D); None: no places
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
        state = self._batch.embed(np.array([token]), np.array([past], np.int32))
        x = [state.x] * leads  # (1, 1, D) each
        older = [] if self._x is None else [self._x]
        self._x = self._batch.sessions.memory.joined([*x, *older])
        self._places[:0] = [token] + [None] * (leads - 1)
        self._under_way += 1
        self._step = 0

    def advance(self) -> StepOutput:
        batch, places, x = self._batch, self._places, self._x
        assert x is not None, "no position has begun"
        key = (batch.steps, self.lead, self._step, len(places))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _SpeculationCall(batch.sessions, *key, batch.width)
        if call.version != batch.version:
            call.bind(batch)
        self._x = y = call.run(x, batch.lengths[0], places)
        self._step += 1
        drafts = self._step % self.lead == 0
        ends = self._step + (len(places) - 1) * self.lead == batch.steps
        if not drafts and not ends:
            return StepOutput(None, None)
        logits = batch.read_off(call.jumped(x, y) if drafts else y[-1:])[::-1]
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
            self._x = y[: len(places)] if places else None
        return StepOutput(rest if drafts else None, last)

    def keep(self, count: int) -> None:
        while self._under_way > count or (self._places and self._places[0] is None):
            self._under_way -= self._places.pop(0) is not None
            self._step += self.lead
        if self._x is not None:
            gone = self._x.shape[0] - len(self._places)
            self._x = self._x[gone:] if self._places else None


@final
class _SpeculationCall:
    """A call of this many places with the newest at this step, for one batch after another."""

    def __init__(
        self, sessions: StepSessions, steps: int, lead: int, step: int, count: int, width: int
    ) -> None:
        self.version = -1  # of the batch whose caches are bound
        self._memory = memory = sessions.memory
        self._shape = (count, 1, width)
        self._seqlens: npt.NDArray[np.int32] = np.empty(count, dtype=np.int32)
        self._total: npt.NDArray[np.int32] = np.empty((), dtype=np.int32)
        # Offsets of the places' positions, if every place has a token.
        self._behind = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._steps_done = [step + lead * older for older in range(count)]
        # Steps to the end, this one included: a jump goes this far along the velocity.
        left = [steps - done for done in self._steps_done]
        self._left: FloatArray = np.array(left, dtype=np.float32)[:, None, None]  # (P, 1, 1)
        self._grid = sessions.grid_steps is not None
        times = [sessions.times(done, steps, 1) for done in self._steps_done]
        self._session = sessions.step
        self._binding = self._session.io_binding()
        self._times = {
            name: memory.hold(np.concatenate([each[name] for each in times])) for name in times[0]
        }
        self._held = memory.hold(self._seqlens)
        for name, array in self._times.items():
            memory.bind_input(self._binding, name, array)
        memory.bind_input(self._binding, "seqlens", self._held)
        HOST.bind_input(self._binding, "total", self._total)

    def bind(self, batch: OrtDecodeBatch) -> None:
        """Bind the caches of the batch's only row; they stay until its version changes."""
        caches = batch.along(self._steps_done[0], len(self._steps_done))
        for name, array in zip(batch.names, caches, strict=True):
            self._memory.bind_input(self._binding, name, array)
            self._memory.bind_output(self._binding, f"{name}_out", array)
        self.version = batch.version

    def run(self, x: Array, past: int, places: Sequence[int | None]) -> Array:
        """The states (P, 1, D) one step later, of a row with this many finished positions."""
        if None in places:
            position = past
            for index in range(len(places) - 1, -1, -1):
                self._seqlens[index] = position
                position += places[index] is not None
        else:
            np.add(self._behind, past, out=self._seqlens)
            position = past + len(places)
        self._total[()] = position
        self._memory.write(self._held, self._seqlens)
        y = self._memory.empty(self._shape, np.float32)
        self._memory.bind_input(self._binding, "x", x)
        self._memory.bind_output(self._binding, "y", y)
        self._session.run_with_iobinding(self._binding)
        return y

    def jumped(self, x: Array, y: Array) -> Array:
        """The states (P, 1, D) to read drafts from: where each position would be at the end.

        With the dial of resolution, by a jump along the last velocity. With the dial of time, the
        state itself, which is the answer of an earlier end.
        """
        return y if self._grid else self._memory.jumped(x, y, self._left)


SpeculationCalls = dict[
    tuple[int, int, int, int], _SpeculationCall
]  # (steps, lead, first step, places)


_MOST_CALLS, _MOST_PARTS = 64, 8_192  # calls kept; mapped parts, of which a process may have 65,530
_log = logging.getLogger("stepdial.runtime")
Key = tuple[InterruptibleSession, tuple[tuple[int, int, int], ...]]


@final
class OrtMix:
    """Runs steps of several batches of one model; repeated calls are bound only once."""

    def __init__(self, sessions: StepSessions, manifest: Manifest) -> None:
        # Rungs share a call where memory can be mapped twice, which a device's cannot.
        shares = sessions.memory is HOST and can_map_shared()
        self.most_batches = len(manifest.rungs) if shares else 1
        # A jump needs steps that go straight along the velocity.
        self.can_speculate = manifest.method == "euler"
        self._sessions = sessions
        self._names = cache_names(sessions.stages, manifest.shape.layers)
        self._calls: dict[Key, _MixCall] = {}
        parts = len(self._names) * self.most_batches  # that a call maps, at most
        self._most_calls = max(1, min(_MOST_CALLS, _MOST_PARTS // parts))
        self._apart = False  # whether memory cannot be mapped any more
        self._speculation_calls: SpeculationCalls = {}

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        own = _own(batches)
        pasts = [batch.make_room(some) for batch, some in zip(own, tokens, strict=True)]
        whole = own[0].embed(np.concatenate(tokens), np.concatenate(pasts))
        first = 0
        for batch, past in zip(own, pasts, strict=True):
            rows = slice(first, first + len(past))
            longest = int(past.max()) + 1
            batch.step_state = StepState(whole.x[rows], whole.v[rows], whole.seqlens[rows], longest)
            first += len(past)

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        own = _own(batches)
        logits = own[0].read_off(self._sessions.memory.joined([batch.arrive() for batch in own]))
        found, first = [], 0
        for batch in own:
            found.append(logits[first : first + batch.rows])
            first += batch.rows
        return found

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        own = _own(batches)
        assert len(own) <= self.most_batches, "more batches than mix here"
        if not self._apart:
            try:
                self._run(self._sessions.step_of(sum(batch.rows for batch in own)), own)
                return
            except OSError as error:  # not onnxruntime's
                _log.error("step counts share no more calls: no caches can be mapped (%s)", error)
                self._apart = True
                self._calls.clear()
        for batch in own:
            self._run(self._sessions.step_of(batch.rows), [batch])

    def _run(self, session: InterruptibleSession, own: Sequence[OrtDecodeBatch]) -> None:
        """One step. Calls with the same batches, rows and steps reuse their buffers."""
        key = (session, tuple((one.number, one.rows, _step_of(one)) for one in own))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= self._most_calls:
                self._calls.clear()
            call = self._calls[key] = _MixCall(session, self._sessions, self._names, own)
        call.run(own)

    def speculation(self, batch: DecodeBatch, lead: int) -> Speculation:
        assert isinstance(batch, OrtDecodeBatch), "a batch that does not mix here"
        return OrtSpeculation(batch, lead, self._speculation_calls)


@final
class _MixCall:
    """A step of these batches' rows, with its own state buffers.

    Caches are bound by address, and bound again when they have moved.
    """

    def __init__(
        self,
        session: InterruptibleSession,
        sessions: StepSessions,
        names: Sequence[str],
        batches: Sequence[OrtDecodeBatch],
    ) -> None:
        self._session = session
        self._memory = sessions.memory
        self._binding = session.io_binding()
        self._history = sessions.history
        self._names = names
        self._versions: list[int] = []  # of the batches whose caches are bound
        # The caches of several batches, mapped next to each other.
        self._adjacent: list[CacheArray] = []
        sizes = [batch.rows for batch in batches]
        self._ends: list[int] = np.cumsum(sizes).tolist()
        rows = self._ends[-1]
        first = batches[0].step_state
        assert first is not None
        shape = (rows, *first.x.shape[1:])
        times = [
            sessions.times(_step_of(batch), batch.steps, size)
            for batch, size in zip(batches, sizes, strict=True)
        ]
        self._kept: list[Array] = []
        for name in times[0]:
            values = self._memory.hold(np.concatenate([each[name] for each in times]))
            self._memory.bind_input(self._binding, name, values)
            self._kept.append(values)
        # What several batches bring is copied side by side; that of one is bound where it is.
        self._side_by_side: dict[str, np.ndarray] = {}
        if len(batches) > 1:
            self._side_by_side["x"] = np.empty(shape, dtype=np.float32)
            self._side_by_side["seqlens"] = np.zeros(rows, dtype=np.int32)
            if self._history:
                self._side_by_side["previous"] = np.empty(shape, dtype=np.float32)
            for name, array in self._side_by_side.items():
                HOST.bind_input(self._binding, name, array)
        self._y, self._v = self._output("y", shape), None
        if self._history:
            self._v = self._output("v", shape)
        self._total = np.ones((), dtype=np.int32)
        HOST.bind_input(self._binding, "total", self._total)

    def run(self, batches: Sequence[OrtDecodeBatch]) -> None:
        begin = 0
        versions, longest = [], 0
        for batch, end in zip(batches, self._ends, strict=True):
            step_state = batch.step_state
            assert step_state is not None
            versions.append(batch.version)
            brought = {"x": step_state.x, "seqlens": step_state.seqlens}
            if self._history:
                brought["previous"] = step_state.v
            for name, array in brought.items():
                if self._side_by_side:
                    self._side_by_side[name][begin:end] = array
                else:
                    self._memory.bind_input(self._binding, name, array)
            longest = max(longest, step_state.total)
            begin = end
        self._total[()] = longest
        if versions != self._versions:
            self._bind_caches(batches)
            self._versions = versions
        self._session.run_with_iobinding(self._binding)
        begin = 0
        for batch, end in zip(batches, self._ends, strict=True):
            assert batch.step_state is not None
            # Not copied: this call runs again only for rows that have taken other steps since.
            batch.step_state.x = self._y[begin:end]
            if self._v is not None:
                batch.step_state.v = self._v[begin:end]
            batch.step_state.step += 1
            begin = end

    def _bind_caches(self, batches: Sequence[OrtDecodeBatch]) -> None:
        caches = batches[0].caches(_step_of(batches[0]))
        if len(batches) > 1:
            parts = [batch.parts(_step_of(batch)) for batch in batches]
            shape, kind = caches[0].shape[1:], caches[0].dtype
            self._adjacent = [
                map_adjacent(one).view(kind).reshape(-1, *shape) for one in zip(*parts, strict=True)
            ]
            caches = list(self._adjacent)
        for name, array in zip(self._names, caches, strict=True):
            self._memory.bind_input(self._binding, name, array)
            self._memory.bind_output(self._binding, f"{name}_out", array)

    def _output(self, name: str, shape: tuple[int, ...]) -> Array:
        array = self._memory.empty(shape, np.float32)
        self._memory.bind_output(self._binding, name, array)
        return array


def _own(batches: Sequence[DecodeBatch]) -> list[OrtDecodeBatch]:
    own = [batch for batch in batches if isinstance(batch, OrtDecodeBatch)]
    assert len(own) == len(batches), "batches that do not mix here"
    return own


def _step_of(batch: OrtDecodeBatch) -> int:
    assert batch.step_state is not None, "a batch that has not begun"
    return batch.step_state.step
