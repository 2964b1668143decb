"""Rows of one decoder rung that decode together on onnxruntime.

Knows when to bind which buffer; which rows there are, and why, is the engine's affair.
"""

from dataclasses import dataclass
from itertools import count
from typing import final

import numpy as np
import numpy.typing as npt

from serve.runtime.kv_cache import CacheLayout, RowCaches
from serve.runtime.ort_crossing import OrtCrossing
from serve.runtime.ort_ends import OrtEnds
from serve.runtime.ort_reading import OrtReading, last_of
from serve.runtime.ort_steps import StepSessions
from serve.runtime.pages import Part
from serve.runtime.protocol import CacheArray, FloatArray, IntArray, Reading, WindowFullError
from serve.runtime.token_checks import check_tokens

_NUMBERS = count()  # of all batches, so that none is ever taken for another
_FIRST_OF_ONE = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class Stand:
    """Where the rows of a batch stand between two steps."""

    x: FloatArray  # (B, 1, D)
    v: FloatArray  # (B, 1, D): the velocity of the step before, where the method looks back
    seqlens: npt.NDArray[np.int32]  # (B,)
    total: int  # positions of the longest row, with the new one
    step: int = 0


@final
class OrtDecodeBatch:
    """Caches as prefixes of shared buffers; the step reads and writes them in place."""

    def __init__(
        self,
        sessions: StepSessions,
        ends: OrtEnds,
        names: list[str],
        layout: CacheLayout,
        width: int,
        vocab_size: int,
    ) -> None:
        self.stand: Stand | None = None  # None: between two tokens
        self.number = next(_NUMBERS)
        self.sessions, self.names, self.width = sessions, names, width
        self._ends = ends
        self._vocab_size = vocab_size
        self._caches = RowCaches(layout)
        self._past: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)  # (B,)
        self._rooms: list[int] = []  # positions that each row may come to have
        self._lead = 1  # of the last row that ran ahead
        self._crossing: OrtCrossing | None = None  # of one token a row, until rows or buffers move

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = self._past.tolist()
        return lengths

    @property
    def layout(self) -> CacheLayout:
        return self._caches.layout

    @property
    def max_tokens(self) -> int:
        return self.layout.max_tokens

    @property
    def rows(self) -> int:
        return len(self._past)

    @property
    def version(self) -> int:
        """Another one whenever the caches move."""
        return self._caches.version

    @property
    def nbytes(self) -> int:
        return self._caches.nbytes

    @property
    def steps(self) -> int:
        return self._caches.layout.buffers // len(self.names)

    def read(self, tokens: IntArray, positions: int = 0) -> OrtReading:
        tokens = check_tokens(tokens, 1, self._vocab_size)  # (S,)
        max_tokens = self._caches.layout.max_tokens
        if len(tokens) > max_tokens:
            raise WindowFullError(
                f"a prompt of {len(tokens)} tokens is longer than max_tokens ({max_tokens}); "
                "keep its last ones"
            )
        # As the last row that ran ahead wanted them: the next one probably wants the same.
        caches = RowCaches(self._caches.layout, self._lead)
        return OrtReading(caches, self._open_alone, tokens, positions)

    def join(self, reading: Reading) -> None:
        assert isinstance(reading, OrtReading) and reading.done, "nothing that was read here"
        assert self.stand is None, "a row joins between two tokens"
        row, length = len(self._past), len(reading.tokens)
        if row == 0:
            self._caches = reading.caches
        else:
            longest = self._longest()
            self._caches.reserve(
                row, longest, row + 1, max(reading.room, *self._rooms, longest + 1)
            )
            self._caches.take(row, reading.caches, length)
        self._past = np.append(self._past, np.int32(length))
        self._rooms.append(reading.room)
        self._crossing = None

    def add(self, tokens: IntArray) -> FloatArray:
        reading = self.read(tokens)
        while (logits := reading.advance()) is None:
            pass
        self.join(reading)
        return logits.copy()

    def extend(self, row: int, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, 1, self._vocab_size)  # (S,)
        self._check_row(row)
        past, max_tokens = int(self._past[row]), self._caches.layout.max_tokens
        if past + len(tokens) > max_tokens:
            raise WindowFullError(
                f"{len(tokens)} tokens behind {past} are more than max_tokens ({max_tokens})"
            )
        rows = len(self._past)
        longest = self._longest()
        if self._caches.reserve(rows, longest, rows, max(past + len(tokens), longest)):
            self._crossing = None
        caches = [array[row : row + 1] for array in self._caches.arrays]
        crossing = self._open(caches, tokens[None], _one(past), np.arange(len(tokens)))
        logits: FloatArray = crossing.run()[0]  # (S, V)
        self._past[row] += len(tokens)
        return logits

    def step(self, tokens: IntArray) -> FloatArray:
        self.make_room(tokens)
        if self._crossing is None:
            one, caches = np.zeros((self.rows, 1), dtype=np.int64), self._used()
            self._crossing = self._open(caches, one, self._past, _FIRST_OF_ONE)
        self._crossing.tokens[:, 0] = tokens
        logits: FloatArray = self._crossing.run()[:, 0].copy()  # (B, V)
        self._past += 1
        return logits

    def begin(self, tokens: IntArray) -> None:
        self.stand = self.embed(tokens, self.make_room(tokens))

    def end(self) -> FloatArray:
        return self.read_off(self.arrive())

    def arrive(self) -> FloatArray:
        """States (B, 1, D) behind the last step; every row grows by one position."""
        assert self.stand is not None and self.stand.step == self.steps, "not at the last step"
        x, self.stand = self.stand.x, None
        self._past += 1
        return x

    def embed(self, tokens: IntArray, past: npt.NDArray[np.int32]) -> Stand:
        """Where rows with these tokens (B,) stand first, behind so many positions (B,)."""
        x, seqlens, total = self._ends.embed(tokens, past, len(tokens))
        x = x.copy()
        v = np.zeros_like(x) if self.sessions.history else x
        return Stand(x, v, seqlens.copy(), int(total))

    def state(self, token: int, past: int) -> FloatArray:
        """Where one row (1, 1, D) with this token stands first; the next call overwrites it."""
        return self._ends.embed(token, past)[0]

    def read_off(self, x: FloatArray) -> FloatArray:
        """Logits (B, V) of states (B, 1, D)."""
        return self._ends.head(x)

    def reach(self, positions: int, lead: int) -> None:
        """Room for so many positions in the only row, which is to run ahead with this lead.

        Before the last of them is begun.
        """
        assert self.rows == 1 and self.stand is None
        self._lead, held = lead, positions - 1
        arranged = self._caches.arrange(lead, held)
        if self._caches.reserve(1, held, 1, positions) or arranged:
            self._crossing = None

    def along(self, step: int, count: int) -> list[CacheArray]:
        """The caches of the only row at this step and those that are a lead further each."""
        return self._caches.along(step, count)

    def lengthen(self) -> None:
        """The only row has one position more, which was written from outside."""
        assert self.rows == 1
        self._past += 1

    def caches(self, step: int) -> list[CacheArray]:
        """The caches of a step; they stay where they are until the next version."""
        each, rows = len(self.names), self.rows
        return [array[:rows] for array in self._caches.arrays[step * each : (step + 1) * each]]

    def parts(self, step: int) -> list[Part]:
        """The same, to be seen next to those of other batches."""
        return self._caches.parts(step, self.rows)

    def remove(self, row: int) -> None:
        self._check_row(row)
        assert self.stand is None, "a row leaves between two tokens"
        last = len(self._past) - 1
        if row != last:
            self._caches.move(last, row, int(self._past[last]))
        past = self._past[:last].copy()
        if row != last:
            past[row] = self._past[last]
        self._past = past
        self._rooms[row] = self._rooms[last]
        self._rooms.pop()
        longest = self._longest()
        self._caches.shrink(len(past), longest, max(longest + 1, *self._rooms, 0))
        self._crossing = None

    def _longest(self) -> int:
        return int(self._past.max(initial=0))

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._past):
            raise IndexError(f"there is no row {row} among {len(self._past)}")

    def make_room(self, tokens: IntArray) -> npt.NDArray[np.int32]:
        """Room for one token (B,) more in every row; the positions (B,) that they have."""
        assert self.stand is None, "the rows are under way"
        rows = len(self._past)
        if tokens.shape != (rows,) or rows == 0:
            raise ValueError(f"step takes one token for each of {rows} rows, not {tokens.shape}")
        longest = self._longest()
        if longest >= self._caches.layout.max_tokens:
            raise WindowFullError(
                f"row {int(self._past.argmax())} has max_tokens ({longest}) cached positions; "
                "remove it and add its last tokens again"
            )
        if self._caches.reserve(rows, longest, rows, longest + 1):
            self._crossing = None
        return self._past

    def _used(self) -> list[CacheArray]:
        return [array[: len(self._past)] for array in self._caches.arrays]

    def _open_alone(self, caches: list[CacheArray], tokens: IntArray, past: int) -> OrtCrossing:
        return self._open(caches, tokens[None], _one(past), last_of(tokens))

    def _open(
        self,
        caches: list[CacheArray],
        tokens: IntArray,
        past: npt.NDArray[np.int32],
        keep: IntArray,
    ) -> OrtCrossing:
        return OrtCrossing(
            self.sessions,
            self.names,
            caches,
            tokens,
            past,
            keep,
            self.width,
            self._vocab_size,
        )


def _one(past: int) -> npt.NDArray[np.int32]:
    return np.array([past], dtype=np.int32)
