"""Tokens of some rows on their way through all steps of a rung, with buffers bound in advance.

Knows which buffer goes into which call; not how the rows' caches came to lie where they do.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from serve.runtime.ort_binding import bind_input, bind_output
from serve.runtime.ort_steps import StepSessions
from serve.runtime.protocol import CacheArray, FloatArray, IntArray


@final
class OrtCrossing:
    """Valid while the caches stay where they are: `run` reads tokens and past anew every time."""

    def __init__(
        self,
        sessions: StepSessions,
        names: Sequence[str],
        caches: Sequence[CacheArray],
        tokens: IntArray,
        past: npt.NDArray[np.int32],
        keep: IntArray,
        width: int,
        vocab_size: int,
    ) -> None:
        """`caches` has the buffers of one step behind those of another; `names` are a step's."""
        self.tokens, self.past = tokens, past  # (B, S), (B,)
        rows, length = tokens.shape
        self.logits = np.empty((rows, len(keep), vocab_size), dtype=np.float32)  # (B, K, V)
        self._sessions = sessions
        steps = len(caches) // len(names)
        states = [np.empty((rows, length, width), dtype=np.float32) for _ in range(2)]
        velocities = [np.zeros_like(states[0]) for _ in range(2 if sessions.history else 0)]
        seqlens, total = np.empty(rows, dtype=np.int32), np.empty((), dtype=np.int32)
        self._embed = sessions.embed.io_binding()
        bind_input(self._embed, "tokens", tokens)
        bind_input(self._embed, "past", past)
        bind_output(self._embed, "x", states[0])
        bind_output(self._embed, "seqlens", seqlens)
        bind_output(self._embed, "total", total)
        self._step = sessions.step_of(tokens.size)
        self._steps: list[ort.IOBinding] = []
        self._kept: list[object] = [keep, *states, *velocities, seqlens, total, list(caches)]
        for step in range(steps):
            binding = self._step.io_binding()
            now, then = step % 2, (step + 1) % 2
            bind_input(binding, "x", states[now])
            bind_output(binding, "y", states[then])
            told = sessions.times(step, steps, rows)
            self._kept.append(told)
            for name, array in told.items():
                bind_input(binding, name, array)
            if sessions.history:
                bind_input(binding, "previous", velocities[now])
                bind_output(binding, "v", velocities[then])
            bind_input(binding, "seqlens", seqlens)
            bind_input(binding, "total", total)
            here = caches[step * len(names) : (step + 1) * len(names)]
            for name, cache in zip(names, here, strict=True):
                bind_input(binding, name, cache)
                bind_output(binding, f"{name}_out", cache)
            self._steps.append(binding)
        self._head = sessions.head.io_binding()
        bind_input(self._head, "x", states[steps % 2])
        bind_input(self._head, "keep", keep)
        bind_output(self._head, "logits", self.logits)

    @property
    def steps(self) -> int:
        return len(self._steps)

    def run(self) -> FloatArray:
        """The logits, which the next run overwrites."""
        self.begin()
        self.cross(0, self.steps)
        return self.end()

    def begin(self) -> None:
        """Embed the tokens."""
        self._sessions.embed.run_with_iobinding(self._embed)

    def cross(self, first: int, end: int) -> None:
        """Take these steps, which come next."""
        for binding in self._steps[first:end]:
            self._step.run_with_iobinding(binding)

    def end(self) -> FloatArray:
        """The logits, once all steps have been taken; the next run overwrites them."""
        self._sessions.head.run_with_iobinding(self._head)
        return self.logits
