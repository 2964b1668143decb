"""Batches of different rungs of one decoder that share calls of the one-step graph, or go abreast.

In a shared call the caches of all batches are seen side by side, so their rows run as those of one
batch do. Abreast, each batch has a thread of its own, which meets the others only at the end.
Knows which buffers go into which call; not which batches should go together.
"""

import logging
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from serve.bundle import BundleError, Manifest
from serve.runtime.interface import cache_names
from serve.runtime.interruptible import InterruptibleSession
from serve.runtime.mixing import Leg, Outcome, Wave
from serve.runtime.ort_batch import OrtDecodeBatch, Stand
from serve.runtime.ort_binding import bind_input, bind_output
from serve.runtime.ort_steps import StepSessions
from serve.runtime.ort_wave import OrtWave, WaveCalls
from serve.runtime.pages import can_be_neighbours, side_by_side
from serve.runtime.protocol import CacheArray, DecodeBatch, FloatArray, IntArray
from serve.runtime.threads import Threads

_MOST_CALLS, _MOST_PARTS = 64, 8_192  # kept; of caches, of which a process may map 65,530
_log = logging.getLogger("stepdial.runtime")
Open = Callable[[], InterruptibleSession]
Key = tuple[InterruptibleSession, tuple[tuple[int, int, int], ...]]


@final
class OrtMix:
    """Single steps of several batches; the calls that come again are bound once."""

    def __init__(
        self,
        sessions: StepSessions,
        manifest: Manifest,
        open_alone: Open,
        threads: Threads,
    ) -> None:
        """`open_alone` is for one thread."""
        self.most_batches = len(manifest.rungs) if can_be_neighbours() else 1
        self.sides = threads.most
        # Only there a step goes straight along the velocity, which a jump prolongs.
        self.runs_ahead = manifest.method == "euler"
        self._sessions = sessions
        self._alone = _Late(open_alone)
        self._threads = threads
        self._names = cache_names(sessions.stages, manifest.shape.layers)
        self._calls: dict[Key, _Call] = {}
        self._most_calls = _most_calls(len(self._names) * self.most_batches)
        self._apart = False  # whether no more memory could be mapped
        self._wave_calls: WaveCalls = {}

    def begin(self, batches: Sequence[DecodeBatch], tokens: Sequence[IntArray]) -> None:
        going = _own(batches)
        pasts = [batch.make_room(some) for batch, some in zip(going, tokens, strict=True)]
        whole = going[0].embed(np.concatenate(tokens), np.concatenate(pasts))
        first = 0
        for batch, past in zip(going, pasts, strict=True):
            rows = slice(first, first + len(past))
            longest = int(past.max()) + 1
            batch.stand = Stand(whole.x[rows], whole.v[rows], whole.seqlens[rows], longest)
            first += len(past)

    def end(self, batches: Sequence[DecodeBatch]) -> list[FloatArray]:
        going = _own(batches)
        logits = going[0].read_off(np.concatenate([batch.arrive() for batch in going]))
        found, first = [], 0
        for batch in going:
            found.append(logits[first : first + batch.rows])
            first += batch.rows
        return found

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        going = _own(batches)
        assert len(going) <= self.most_batches, "more batches than mix here"
        if not self._apart:
            try:
                self._run(self._sessions.step_of(sum(batch.rows for batch in going)), going)
                return
            except OSError as error:  # not onnxruntime's
                _log.error("rungs share no more calls: no caches can be mapped (%s)", error)
                self._apart = True
                self._calls.clear()
        for batch in going:
            self._run(self._sessions.step_of(batch.rows), [batch])

    def abreast(self, sides: Sequence[Sequence[Leg]]) -> list[list[Outcome]]:
        session = self._alone.get() or self._sessions.step

        def run(legs: Sequence[Leg]) -> list[Outcome]:
            return [self._take(leg, session) for leg in legs]

        return self._threads.each(run, sides)

    def _take(self, leg: Leg, session: InterruptibleSession) -> Outcome:
        batch = leg.batch
        assert isinstance(batch, OrtDecodeBatch), "a batch that does not mix here"
        try:
            if leg.tokens is not None:
                batch.begin(leg.tokens)
            for _ in range(leg.steps):
                self._run(session, [batch])
            return batch.end() if _standing(batch) == batch.steps else None
        except Exception as error:  # onnxruntime has no base class of its own
            return error

    def _run(self, session: InterruptibleSession, going: Sequence[OrtDecodeBatch]) -> None:
        """One step, with the buffers of the last time that so many rows stood there."""
        key = (session, tuple((one.number, one.rows, _standing(one)) for one in going))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= self._most_calls:
                self._calls.clear()
            call = self._calls[key] = _Call(session, self._sessions, self._names, going)
        call.run(going)

    def wave(self, batch: DecodeBatch, lead: int) -> Wave:
        assert isinstance(batch, OrtDecodeBatch), "a batch that does not mix here"
        return OrtWave(batch, lead, self._wave_calls)


@final
class _Late:
    """A session that is opened when rungs first go abreast: it has a copy of the weights."""

    def __init__(self, opening: Open | None) -> None:
        self._opening = opening
        self._session: InterruptibleSession | None = None

    def get(self) -> InterruptibleSession | None:
        """None if the bundle was changed since the other graphs were opened."""
        if self._session is None and self._opening is not None:
            try:
                self._session = self._opening()
            except BundleError as error:
                self._opening = None
                _log.error(
                    "%s; until it is loaded again rungs that go abreast share a session", error
                )
        return self._session


@final
class _Call:
    """So many rows of these batches at these steps, with buffers; batches bring their rows along.

    Caches are bound by address: it keeps none, and takes them anew wherever they have moved.
    """

    def __init__(
        self,
        session: InterruptibleSession,
        sessions: StepSessions,
        names: list[str],
        batches: Sequence[OrtDecodeBatch],
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._history = sessions.history
        self._names = names
        self._versions: list[int] = []  # of the batches whose caches are bound
        self._neighbours: list[CacheArray] = []  # the caches of several, side by side
        sizes = [batch.rows for batch in batches]
        self._ends: list[int] = np.cumsum(sizes).tolist()
        rows = self._ends[-1]
        stands = [batch.stand for batch in batches]
        assert stands[0] is not None
        shape = (rows, *stands[0].x.shape[1:])
        told = [
            sessions.times(_standing(batch), batch.steps, size)
            for batch, size in zip(batches, sizes, strict=True)
        ]
        self._kept: list[np.ndarray] = []
        self._x, self._y = self._new("x", shape), self._new("y", shape, out=True)
        for name in told[0]:
            self._give(name, np.concatenate([each[name] for each in told]))
        if self._history:
            self._previous = self._new("previous", shape)
            self._v = self._new("v", shape, out=True)
        self._seqlens, self._total = np.zeros(rows, dtype=np.int32), np.ones((), dtype=np.int32)
        self._give("seqlens", self._seqlens)
        self._give("total", self._total)

    def run(self, batches: Sequence[OrtDecodeBatch]) -> None:
        begin = 0
        versions, longest = [], 0
        for batch, end in zip(batches, self._ends, strict=True):
            stand = batch.stand
            assert stand is not None
            versions.append(batch.version)
            self._x[begin:end] = stand.x
            if self._history:
                self._previous[begin:end] = stand.v
            self._seqlens[begin:end] = stand.seqlens
            longest = max(longest, stand.total)
            begin = end
        self._total[()] = longest
        if versions != self._versions:
            self._attend(batches)
            self._versions = versions
        self._session.run_with_iobinding(self._binding)
        begin = 0
        for batch, end in zip(batches, self._ends, strict=True):
            assert batch.stand is not None
            # Not copied: this call can come again only with rows that have left this place.
            batch.stand.x = self._y[begin:end]
            if self._history:
                batch.stand.v = self._v[begin:end]
            batch.stand.step += 1
            begin = end

    def _attend(self, batches: Sequence[OrtDecodeBatch]) -> None:
        caches = batches[0].caches(_standing(batches[0]))
        if len(batches) > 1:
            parts = [batch.parts(_standing(batch)) for batch in batches]
            shape, kind = caches[0].shape[1:], caches[0].dtype
            caches = [
                side_by_side(one).view(kind).reshape(-1, *shape) for one in zip(*parts, strict=True)
            ]
            self._neighbours = caches
        for name, array in zip(self._names, caches, strict=True):
            bind_input(self._binding, name, array)
            bind_output(self._binding, f"{name}_out", array)

    def _new(self, name: str, shape: tuple[int, ...], out: bool = False) -> FloatArray:
        array = np.empty(shape, dtype=np.float32)
        self._give(name, array, out)
        return array

    def _give(self, name: str, array: np.ndarray, out: bool = False) -> None:
        self._kept.append(array)
        bind = bind_output if out else bind_input
        bind(self._binding, name, array)


def _most_calls(parts: int) -> int:
    """The calls that may be kept, each of so many parts of caches at most."""
    return max(1, min(_MOST_CALLS, _MOST_PARTS // parts))


def _own(batches: Sequence[DecodeBatch]) -> list[OrtDecodeBatch]:
    going = [batch for batch in batches if isinstance(batch, OrtDecodeBatch)]
    assert len(going) == len(batches), "batches that do not mix here"
    return going


def _standing(batch: OrtDecodeBatch) -> int:
    assert batch.stand is not None, "a batch that has not begun"
    return batch.stand.step
