"""A decoder rung on onnxruntime: prefill, and batches of rows that decode together."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.bundle import Manifest, Rung
from serve.runtime.cache import CacheLayout, MemoryRange, RowCaches
from serve.runtime.device import HOST, Array, ArrayMemory, Caches
from serve.runtime.protocol import FloatArray, IntArray, Prefill, RowArray, WindowFullError
from serve.runtime.session import InterruptibleSession, StepSessions, cache_names, check_tokens

PastArray = npt.NDArray[np.int32]  # (B,): cached positions of each row
Arrays = dict[str, Any]  # by name, of one kind of memory each


class Pass(ABC):
    """A pass of tokens (B, S) behind past positions (B,) through all steps.

    Valid while the caches do not move; it reads `tokens` and `past` anew every time.
    """

    tokens: IntArray
    steps: int

    def run(self) -> FloatArray:
        """Logits (B, K, V); the next run overwrites them."""
        self.begin()
        self.advance(0, self.steps)
        return self.end()

    @abstractmethod
    def begin(self) -> None:
        """Embed the tokens."""

    @abstractmethod
    def advance(self, first: int, end: int) -> None:
        """Run these steps, which come next."""

    @abstractmethod
    def end(self) -> FloatArray:
        """The logits after the last step; the next run overwrites them."""


class Passes(ABC):
    """What rows with caches run on: onnxruntime's sessions, or TensorRT's engines."""

    def __init__(self, sessions: StepSessions, manifest: Manifest) -> None:
        self.sessions = sessions
        # Of the buffers of one step.
        self.names = cache_names(sessions.stages, manifest.shape.layers)
        self.width = manifest.shape.state_width
        self.vocab_size = manifest.text_tokenizer.vocab_size

    @abstractmethod
    def caches(self, layout: CacheLayout, lead: int) -> Caches:
        """Caches without rows."""

    @abstractmethod
    def open(
        self, caches: Sequence[Array], tokens: IntArray, past: PastArray, keep: IntArray
    ) -> Pass:
        """A pass over all buffers, step by step; logits are wanted where `keep` says."""

    @abstractmethod
    def scratch(self, layout: CacheLayout, rows: int, positions: int) -> Sequence[Array]:
        """Buffers for a pass over whole rows, whose contents are not wanted."""


class WholePass(Pass):
    """What every graph of a pass reads and writes, by name: embedding, each step, and head."""

    def __init__(
        self,
        passes: Passes,
        memory: ArrayMemory,
        caches: Sequence[Array],
        made: Sequence[Array],
        tokens: IntArray,
        past: PastArray,
        keep: IntArray,
    ) -> None:
        """`caches` has the buffers of one step after another; a step writes into `made`."""
        sessions, names = passes.sessions, passes.names
        self.tokens, self.past = tokens, past  # (B, S), (B,)
        self.steps = len(caches) // len(names)
        self.memory = memory
        rows, length = tokens.shape
        shape = rows, length, passes.width
        states = [memory.empty(shape, np.float32) for _ in range(2)]
        velocities = [
            memory.hold(np.zeros(shape, np.float32)) for _ in range(2 if sessions.history else 0)
        ]
        seqlens = memory.empty((rows,), np.int32)
        self._given = [(memory.hold(values), values) for values in (tokens, past)]
        self.embedded: Arrays = {"tokens": self._given[0][0], "past": self._given[1][0]}
        self.embedded |= {"x": states[0], "seqlens": seqlens}
        self.stepped: list[Arrays] = []
        for step in range(self.steps):
            now, then = step % 2, (step + 1) % 2
            arrays: Arrays = {"x": states[now], "y": states[then], "seqlens": seqlens}
            for name, values in sessions.times(step, self.steps, rows).items():
                arrays[name] = memory.hold(values)
            if sessions.history:
                arrays |= {"previous": velocities[now], "v": velocities[then]}
            here = slice(step * len(names), (step + 1) * len(names))
            for name, cache, new in zip(names, caches[here], made[here], strict=True):
                arrays[name], arrays[f"{name}_out"] = cache, new
            self.stepped.append(arrays)
        self.logits = memory.empty((rows, len(keep), passes.vocab_size), np.float32)  # (B, K, V)
        self.read_out: Arrays = {"x": states[self.steps % 2], "keep": memory.hold(keep)}
        self.read_out["logits"] = self.logits

    def write_given(self) -> None:
        """Have the graphs see the tokens and the past positions as they are now."""
        for held, values in self._given:
            self.memory.write(held, values)


@final
class BoundPass(WholePass):
    """A pass on onnxruntime, bound to its buffers in advance."""

    def __init__(
        self,
        passes: Passes,
        caches: Sequence[Array],
        tokens: IntArray,
        past: PastArray,
        keep: IntArray,
    ) -> None:
        sessions = self._sessions = passes.sessions
        super().__init__(passes, sessions.memory, caches, caches, tokens, past, keep)
        total = np.empty((), dtype=np.int32)  # attention reads it on the host, wherever it runs
        (self._embed,) = self._bound(sessions.embed, [self.embedded])
        HOST.bind_output(self._embed, "total", total)
        self._step = sessions.step_of(tokens.size)
        self._steps = self._bound(self._step, self.stepped)
        for binding in self._steps:
            HOST.bind_input(binding, "total", total)
        (self._head,) = self._bound(sessions.head, [self.read_out])
        self._total = total  # as long as it is bound

    def begin(self) -> None:
        self.write_given()
        memory = self._sessions.memory
        if memory is not HOST:
            # What a graph reads on the host is copied there when it is bound, not when it runs.
            for name in ("tokens", "past"):
                memory.bind_input(self._embed, name, self.embedded[name])
        self._sessions.embed.run_with_iobinding(self._embed)

    def advance(self, first: int, end: int) -> None:
        for binding in self._steps[first:end]:
            self._step.run_with_iobinding(binding)

    def end(self) -> FloatArray:
        self._sessions.head.run_with_iobinding(self._head)
        return self.memory.read(self.logits)  # type: ignore[return-value]  # float32

    def _bound(self, session: InterruptibleSession, calls: Sequence[Arrays]) -> list[ort.IOBinding]:
        """The calls of a session with these arrays, to be run again and again."""
        memory, bindings = self._sessions.memory, []
        outputs = {node.name for node in session.get_outputs()}
        for arrays in calls:
            binding = session.io_binding()
            for name, array in arrays.items():
                bind = memory.bind_output if name in outputs else memory.bind_input
                bind(binding, name, array)
            bindings.append(binding)
        return bindings


@final
class OrtPasses(Passes):
    """Passes on sessions of onnxruntime."""

    def caches(self, layout: CacheLayout, lead: int) -> Caches:
        return self.sessions.memory.caches(layout, lead)

    def open(
        self, caches: Sequence[Array], tokens: IntArray, past: PastArray, keep: IntArray
    ) -> BoundPass:
        return BoundPass(self, caches, tokens, past, keep)

    def scratch(self, layout: CacheLayout, rows: int, positions: int) -> Sequence[Array]:
        # All steps, stages and layers can use one pair of buffers: each writes all its positions
        # before it reads them, and none starts before the last is done.
        shape = (rows, layout.heads, positions, layout.head_width)
        pair = [self.sessions.memory.empty(shape, layout.kind) for _ in range(2)]
        return pair * (layout.buffers // 2)


# Attention sums in another order for chunks of another size, so a prompt's chunks depend on the
# prompt alone: the same prompt always gives the same logits.


CHUNK_TOKENS = 64
PIECE_TOKENS = 128  # tokens times steps


@final
class OrtPrefill:
    """The prefill of one prompt, in pieces, with caches of its own."""

    def __init__(self, passes: Passes, caches: Caches, tokens: IntArray, positions: int) -> None:
        """`caches` are empty; the row may grow to this many positions."""
        self.tokens = tokens  # (S,)
        self.caches = caches
        # At least one position more, since a prompt is there to be continued.
        self.room = min(max(len(tokens) + 1, positions), caches.layout.max_tokens)
        self.caches.reserve(0, 0, 1, self.room)
        self._passes = passes
        self._bound_pass: Pass | None = None
        self._read = self._step = 0

    @property
    def nbytes(self) -> int:
        return self.caches.nbytes

    @property
    def positions(self) -> int:
        return len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether the whole prompt has been processed."""
        return self._read == len(self.tokens)

    def advance(self) -> FloatArray | None:
        assert not self.done, "all has been read"
        chunk = self.tokens[self._read : self._read + CHUNK_TOKENS]
        if self._bound_pass is None:
            last = np.array([len(chunk) - 1], dtype=np.int64)  # the position whose logits matter
            self._bound_pass = self._passes.open(
                self.caches.arrays, chunk[None], _one(self._read), last
            )
            self._bound_pass.begin()
        bound_pass = self._bound_pass
        end = min(bound_pass.steps, self._step + max(1, PIECE_TOKENS // len(chunk)))
        bound_pass.advance(self._step, end)
        self._step = end
        if end < bound_pass.steps:
            return None
        self._read += len(chunk)
        self._bound_pass, self._step = None, 0
        return bound_pass.end()[0, 0] if self.done else None


_NUMBERS = count()  # unique over all batches
_FIRST_OF_ONE = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class StepState:
    """The state of a batch's rows between two steps."""

    x: Array  # (B, 1, D)
    v: Array  # (B, 1, D): velocity of the last step, for methods that need it
    seqlens: Array  # (B,)
    total: int  # positions of the longest row, the new one included
    step: int = 0


class CachedRows:
    """A batch whose rows are prefixes of shared buffers; each pass updates its caches."""

    def __init__(self, passes: Passes, layout: CacheLayout) -> None:
        self.step_state: StepState | None = None  # None: between two tokens
        self._passes = passes
        self._lead = 1  # of the last row that speculated
        self._caches = passes.caches(layout, self._lead)
        self._past: PastArray = np.zeros(0, dtype=np.int32)  # (B,)
        self._rooms: list[int] = []  # the most positions of each row
        self._bound_pass: Pass | None = None  # one token a row; until rows or buffers move

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
        """Changes whenever the caches move."""
        return self._caches.version

    @property
    def nbytes(self) -> int:
        return self._caches.nbytes

    def read(self, tokens: IntArray, positions: int = 0) -> OrtPrefill:
        tokens = check_tokens(tokens, 1, self._passes.vocab_size)  # (S,)
        max_tokens = self._caches.layout.max_tokens
        if len(tokens) > max_tokens:
            raise WindowFullError(
                f"a prompt of {len(tokens)} tokens is longer than max_tokens ({max_tokens}); "
                "keep its last ones"
            )
        # With the lead of the last row that speculated; the next one probably uses the same.
        caches = self._passes.caches(self._caches.layout, self._lead)
        return OrtPrefill(self._passes, caches, tokens, positions)

    def join(self, prefill: Prefill) -> None:
        assert isinstance(prefill, OrtPrefill) and prefill.done, "nothing that was read here"
        assert self.step_state is None, "a row joins between two tokens"
        row, length = len(self._past), len(prefill.tokens)
        if row == 0:
            self._caches = prefill.caches
        else:
            most = max(prefill.room, *self._rooms, self._longest() + 1)
            self._caches.join(self.lengths, prefill.caches, length, most)
        self._past = np.append(self._past, np.int32(length))
        self._rooms.append(prefill.room)
        self._bound_pass = None

    def add(self, tokens: IntArray) -> FloatArray:
        prefill = self.read(tokens)
        while (logits := prefill.advance()) is None:
            pass
        self.join(prefill)
        return logits.copy()

    def step(self, tokens: IntArray) -> FloatArray:
        self.make_room(tokens)
        if self._bound_pass is None:
            one, caches = np.zeros((self.rows, 1), dtype=np.int64), self._used()
            self._bound_pass = self._passes.open(caches, one, self._past, _FIRST_OF_ONE)
        self._bound_pass.tokens[:, 0] = tokens
        logits: FloatArray = self._bound_pass.run()[:, 0].copy()  # (B, V)
        self._past += 1
        return logits

    def remove(self, row: int) -> None:
        if not 0 <= row < len(self._past):
            raise IndexError(f"there is no row {row} among {len(self._past)}")
        assert self.step_state is None, "a row leaves between two tokens"
        before, last = self.lengths, len(self._past) - 1
        past = self._past[:last].copy()
        if row != last:
            past[row] = self._past[last]
        self._past = past
        self._rooms[row] = self._rooms[last]
        self._rooms.pop()
        self._caches.leave(row, before, max(self._longest() + 1, *self._rooms, 0))
        self._bound_pass = None

    def _longest(self) -> int:
        return int(self._past.max(initial=0))

    def make_room(self, tokens: IntArray) -> PastArray:
        """Make room for one more token (B,) in every row; returns the positions (B,) they have."""
        assert self.step_state is None, "the rows are under way"
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
            self._bound_pass = None
        return self._past

    def _used(self) -> list[Array]:
        return [array[: len(self._past)] for array in self._caches.arrays]


@final
class OrtDecodeBatch(CachedRows):
    """Rows on onnxruntime, which also run step by step, share calls, and speculate."""

    def __init__(self, passes: Passes, layout: CacheLayout) -> None:
        super().__init__(passes, layout)
        self.number = next(_NUMBERS)
        self.sessions, self.names, self.width = passes.sessions, passes.names, passes.width

    @property
    def steps(self) -> int:
        return self._caches.layout.buffers // len(self.names)

    def arrive(self) -> Array:
        """States (B, 1, D) after the last step; every row grows by one position."""
        assert self.step_state is not None and self.step_state.step == self.steps, (
            "not at the last step"
        )
        x, self.step_state = self.step_state.x, None
        self._past += 1
        return x

    def embed(self, tokens: IntArray, past: PastArray) -> StepState:
        """The first state of rows with these tokens (B,), after these positions (B,)."""
        sessions = self.sessions
        given: dict[str, Array] = {"tokens": tokens[:, None], "past": past}
        x, seqlens = sessions.memory.run(sessions.embed, ["x", "seqlens"], given)
        # At the first step the last velocity has no weight, so any numbers do.
        return StepState(x, x, seqlens, int(past.max()) + 1)

    def read_off(self, x: Array) -> FloatArray:
        """Logits (B, V) of states (B, 1, D)."""
        sessions = self.sessions
        given = {"x": x, "keep": _FIRST_OF_ONE}
        (logits,) = sessions.memory.run(sessions.head, ["logits"], given)
        return sessions.memory.read(logits)[:, 0]  # type: ignore[return-value]  # float32

    def reach(self, positions: int, lead: int) -> None:
        """Make room for this many positions in the only row, which speculates with this lead.

        Call before the last of them is begun.
        """
        assert self.rows == 1 and self.step_state is None
        self._lead, held = lead, positions - 1
        arranged = self._caches.arrange(lead, held)
        if self._caches.reserve(1, held, 1, positions) or arranged:
            self._bound_pass = None

    def along(self, step: int, count: int) -> Sequence[Array]:
        """The only row's caches at this step and the next ones, each a lead further."""
        return self._caches.along(step, count)

    def lengthen(self) -> None:
        """The only row has one position more, which a speculation has written."""
        assert self.rows == 1
        self._past += 1

    def caches(self, step: int) -> list[Array]:
        """The caches of a step; they stay where they are until the version changes."""
        each, rows = len(self.names), self.rows
        return [array[:rows] for array in self._caches.arrays[step * each : (step + 1) * each]]

    def parts(self, step: int) -> list[MemoryRange]:
        """The caches of a step as memory ranges, to be mapped next to those of other batches."""
        assert isinstance(self._caches, RowCaches), "caches of a device"
        return self._caches.parts(step, self.rows)


def _one(past: int) -> PastArray:
    return np.array([past], dtype=np.int32)


_FORWARD_TOKENS = 8192


class CachedDecoder:
    """A rung with caches: opens batches, and runs whole sequences for verification."""

    def __init__(self, passes: Passes, layout: CacheLayout) -> None:
        self._passes = passes
        self._layout = layout

    def open_batch(self) -> CachedRows:
        return CachedRows(self._passes, self._layout)

    def bytes_for(self, positions: int, rows: int = 1) -> int:
        return self._layout.bytes_for(positions, rows)

    def forward(self, rows: RowArray) -> FloatArray:
        """Logits (B, S, V) at every position of tokens (B, S)."""
        tokens = check_tokens(rows, 2, self._passes.vocab_size)
        count, length = tokens.shape
        if length > self._layout.max_tokens:
            raise ValueError(
                f"{length} tokens a row are more than max_tokens ({self._layout.max_tokens})"
            )
        chunk = max(1, _FORWARD_TOKENS // length)
        return np.concatenate(
            [self._forward_rows(tokens[at : at + chunk]) for at in range(0, count, chunk)]
        )

    def _forward_rows(self, tokens: IntArray) -> FloatArray:
        rows, length = tokens.shape
        one_pass = self._passes.open(
            self._passes.scratch(self._layout, rows, length),
            tokens,
            np.zeros(rows, dtype=np.int32),
            np.arange(length, dtype=np.int64),
        )
        return one_pass.run()


@final
class OrtDecoder(CachedDecoder):
    """A rung with caches on onnxruntime."""

    def __init__(self, sessions: StepSessions, manifest: Manifest, rung: Rung) -> None:
        super().__init__(OrtPasses(sessions, manifest), CacheLayout.of(manifest, rung))

    def open_batch(self) -> OrtDecodeBatch:
        return OrtDecodeBatch(self._passes, self._layout)
