"""Batches of different rungs of one decoder that share calls of the one-step graph.

Their rows run together through every product, and attend batch by batch, each to its own caches.
Knows which buffers go into which call; not which batches should go together.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import onnxruntime as ort

from serve.bundle import BundleError, Method
from serve.runtime.ort_batch import OrtDecodeBatch
from serve.runtime.ort_steps import StepSessions
from serve.runtime.ort_wave import OrtWave, WaveCalls
from serve.runtime.protocol import CacheArray, DecodeBatch, Wave

_KEPT_CALLS = 64
_log = logging.getLogger("stepdial.runtime")
Key = tuple[tuple[int, int], ...]


@final
class OrtMix:
    """Single steps of several batches; the calls that come again are bound once."""

    def __init__(
        self,
        sessions: StepSessions,
        names: list[str],
        method: Method,
        open_mixed: Callable[[], ort.InferenceSession] | None,
        groups: int,
    ) -> None:
        self.most_batches = 1 if open_mixed is None else groups
        # Only there a step goes straight along the velocity, which a jump prolongs.
        self.runs_ahead = method == "euler"
        self._sessions = sessions
        self._open_mixed = open_mixed
        self._mixed: ort.InferenceSession | None = None
        self._names = names
        self._calls: dict[Key, _Call] = {}
        self._wave_calls: WaveCalls = {}

    def advance(self, batches: Sequence[DecodeBatch]) -> None:
        going = [batch for batch in batches if isinstance(batch, OrtDecodeBatch)]
        assert len(going) == len(batches) <= self.most_batches, "batches that do not mix here"
        key = tuple((one.version, _standing(one)) for one in going)
        call = self._calls.get(key) or self._open(key, going)
        if call is not None:
            call.run(going)
            return
        for batch in going:
            self.advance([batch])

    def wave(self, batch: DecodeBatch, lead: int) -> Wave:
        assert isinstance(batch, OrtDecodeBatch), "a batch that does not mix here"
        return OrtWave(batch, lead, self._wave_calls)

    def _open(self, key: Key, going: Sequence[OrtDecodeBatch]) -> "_Call | None":
        """Its buffers, kept from now on; None if rungs would meet that cannot any more."""
        bounds = self._sessions.parts.bounds(sum(batch.rows for batch in going))
        shares = _shares(going, bounds)
        meet = any(len(pieces) > 1 for pieces in shares)
        mixed = self._mixing() if meet else None
        if meet and mixed is None:
            return None
        if len(self._calls) >= _KEPT_CALLS:
            self._calls.clear()
        call = _Call(self._sessions, mixed, self._names, bounds, shares, self.most_batches)
        self._calls[key] = call
        return call

    def _mixing(self) -> ort.InferenceSession | None:
        """Opened when rungs first meet: it has a copy of the weights.

        None if the bundle was changed since the other graphs were opened.
        """
        if self._mixed is None and self._open_mixed is not None:
            try:
                self._mixed = self._open_mixed()
            except BundleError as error:
                self._open_mixed = None
                _log.error("%s; until it is loaded again its rungs go one by one", error)
        return self._mixed


@final
class _Call:
    """One composition of batches and steps, with its buffers; batches bring their rows along."""

    def __init__(
        self,
        sessions: StepSessions,
        mixed: ort.InferenceSession | None,
        names: list[str],
        bounds: Sequence[tuple[int, int]],
        shares: "Sequence[Sequence[_Piece]]",
        groups: int,
    ) -> None:
        self._run_parts = sessions.parts.run
        self._history = sessions.history
        shape = (bounds[-1][1], 1, shares[0][0].batch.width)
        self._x = np.empty(shape, dtype=np.float32)  # (B, 1, D)
        self._y = np.empty_like(self._x)
        self._previous, self._v = np.empty_like(self._x), np.empty_like(self._x)
        self._parts: list[_Part] = []
        for (low, high), pieces in zip(bounds, shares, strict=True):
            session = sessions.step if len(pieces) == 1 else mixed
            assert session is not None, "pieces that cannot mix"
            part = _Part(session, sessions, names, pieces, groups)
            part.give("x", self._x[low:high])
            part.give("y", self._y[low:high], out=True)
            if self._history:
                part.give("previous", self._previous[low:high])
                part.give("v", self._v[low:high], out=True)
            self._parts.append(part)

    def run(self, batches: Sequence[OrtDecodeBatch]) -> None:
        begin = 0
        for batch in batches:
            stand, end = batch.stand, begin + batch.rows
            assert stand is not None
            self._x[begin:end] = stand.x
            if self._history:
                self._previous[begin:end] = stand.v
            begin = end
        self._run_parts([partial(part.run, batches) for part in self._parts])
        begin = 0
        for batch in batches:
            assert batch.stand is not None
            end = begin + batch.rows
            # Not copied: this call can come again only with rows that have left this place.
            batch.stand.x = self._y[begin:end]
            if self._history:
                batch.stand.v = self._v[begin:end]
            batch.stand.step += 1
            begin = end


@final
class _Part:
    """Rows of one or more of the batches, bound to a session."""

    def __init__(
        self,
        session: ort.InferenceSession,
        sessions: StepSessions,
        names: list[str],
        pieces: "Sequence[_Piece]",
        groups: int,
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        # Not the batches themselves: this may be kept for longer than they are.
        self._rows = [(piece.index, piece.low, piece.high) for piece in pieces]
        self._kept: list[ort.OrtValue] = []
        self._lengths: list[tuple[np.ndarray, np.ndarray]] = []
        told = [
            sessions.times(_standing(piece.batch), piece.batch.steps, piece.rows)
            for piece in pieces
        ]
        for name in told[0]:
            self.give(name, np.concatenate([each[name] for each in told]))
        mixed = len(pieces) > 1
        for group, piece in enumerate(pieces):
            slots = piece.batch.slots(_standing(piece.batch), piece.low, piece.high)
            self._attend(
                f"_{group}" if mixed else "", piece.rows, dict(zip(names, slots, strict=True))
            )
        if mixed:
            idle = groups - len(pieces)
            cache = _empty_slot(pieces[0].batch)
            for group in range(len(pieces), groups):
                own = {name: ort.OrtValue.ortvalue_from_numpy(cache.copy()) for name in names}
                self._attend(f"_{group}", 1, own)
            sizes = [piece.rows for piece in pieces]
            self.give("order", np.array([*range(sum(sizes)), *[0] * idle], dtype=np.int64))
            self.give("sizes", np.array([*sizes, *[1] * idle], dtype=np.int64))

    def run(self, batches: Sequence[OrtDecodeBatch]) -> None:
        for (index, low, high), (seqlens, total) in zip(self._rows, self._lengths, strict=False):
            stand = batches[index].stand
            assert stand is not None
            seqlens[:], total[()] = stand.seqlens[low:high], stand.total
        self._session.run_with_iobinding(self._binding)

    def give(self, name: str, array: np.ndarray, out: bool = False) -> None:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._kept.append(value)
        bind = self._binding.bind_ortvalue_output if out else self._binding.bind_ortvalue_input
        bind(name, value)

    def _attend(self, suffix: str, rows: int, caches: Mapping[str, ort.OrtValue]) -> None:
        seqlens, total = np.zeros(rows, dtype=np.int32), np.ones((), dtype=np.int32)
        self.give(f"seqlens{suffix}", seqlens)
        self.give(f"total{suffix}", total)
        self._lengths.append((seqlens, total))
        for name, value in caches.items():
            self._kept.append(value)
            self._binding.bind_ortvalue_input(f"{name}{suffix}", value)
            self._binding.bind_ortvalue_output(f"{name}_out{suffix}", value)


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a batch that are in one part."""

    index: int  # of the batch in the call
    batch: OrtDecodeBatch
    low: int
    high: int

    @property
    def rows(self) -> int:
        return self.high - self.low


def _shares(
    batches: Sequence[OrtDecodeBatch], bounds: Sequence[tuple[int, int]]
) -> list[list[_Piece]]:
    """What each part has of the batches, whose rows come one behind the other."""
    shares: list[list[_Piece]] = []
    for low, high in bounds:
        pieces, begin = [], 0
        for index, batch in enumerate(batches):
            first, last = max(low - begin, 0), min(high - begin, batch.rows)
            if first < last:
                pieces.append(_Piece(index, batch, first, last))
            begin += batch.rows
        shares.append(pieces)
    return shares


def _standing(batch: OrtDecodeBatch) -> int:
    assert batch.stand is not None, "a batch that has not begun"
    return batch.stand.step


def _empty_slot(batch: OrtDecodeBatch) -> CacheArray:
    """Of one row and one position."""
    layout = batch.layout
    return np.zeros((1, layout.heads, 1, layout.head_width), dtype=layout.kind)
