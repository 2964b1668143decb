"""What a model answers at a rung, in float64 and in float32: what its graphs are held against.

Knows models and samples; not how a graph is run or how far it may be off.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.samples import Inputs
from train.model import OTTransformer, Stepped

MOST_AHEAD_BYTES = 64 << 20  # of answers that nobody has asked for yet


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer to one sample at one rung."""

    inputs: Inputs
    logits: NDArray[np.float64]
    float32_error: float  # the farthest that torch's own float32 is from these

    @property
    def scale(self) -> float:
        return float(np.abs(self.logits).max())


class Answers:
    """The answers of a model in float32 to samples, at any rung of one method."""

    def __init__(self, model: Stepped, samples: Sequence[Inputs], method: str) -> None:
        self.samples, self.method = samples, method
        single = model.eval()
        shared = {id(tensor): tensor for tensor in (*single.parameters(), *single.buffers())}
        self._single = _remembering(copy.deepcopy(single, shared))
        self._double = _remembering(copy.deepcopy(single).double())
        self._ahead: dict[tuple[int, int], Expected] = {}  # by steps and sample

    def at(self, steps: int) -> list[Expected]:
        """The answers to all samples, once: what was known before is forgotten then."""
        known = (self._ahead.pop((steps, index), None) for index in range(len(self.samples)))
        return [
            self.expect(steps, inputs) if one is None else one
            for one, inputs in zip(known, self.samples, strict=True)
        ]

    @contextmanager
    def ahead(self, ladder: Iterable[int]) -> Iterator[None]:
        """Work out answers beside what the block does; when that ends, no more are begun."""
        ended = Event()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._work_ahead, sorted(ladder), ended)
            try:
                yield
            finally:
                ended.set()
        done.result()

    def _work_ahead(self, ladder: Sequence[int], ended: Event) -> None:
        held_bytes = sum(known.logits.nbytes for known in self._ahead.values())
        for steps in ladder:
            for index, inputs in enumerate(self.samples):
                if ended.is_set() or held_bytes > MOST_AHEAD_BYTES:
                    return
                if (steps, index) not in self._ahead:
                    self._ahead[steps, index] = answer = self.expect(steps, inputs)
                    held_bytes += answer.logits.nbytes

    def expect(self, steps: int, inputs: Inputs) -> Expected:
        """The answer to one sample."""
        logits = self._logits(self._double, inputs, steps)
        error = (self._logits(self._single, inputs, steps).double() - logits).abs().max()
        return Expected(inputs, logits.numpy(), float(error))

    def _logits(self, model: Stepped, inputs: Inputs, steps: int) -> Tensor:
        kind = next(model.parameters()).dtype
        cast = (each.to(kind) if each.is_floating_point() else each for each in inputs)
        with torch.no_grad():
            logits: Tensor = model(*cast, steps=steps, method=self.method).logits
        return logits


class FirstKept(nn.Module):
    """A velocity that keeps its first answer for each shape: there all rungs begin alike."""

    def __init__(self, velocity: nn.Module) -> None:
        super().__init__()
        self.velocity = velocity
        self._first: dict[torch.Size, tuple[tuple[Tensor, ...], Tensor]] = {}

    def forward(self, *state: Tensor) -> Tensor:
        """Of x and its context."""
        shape = state[0].shape
        if shape in self._first:
            given, answer = self._first[shape]
            if all(map(torch.equal, given, state)):
                return answer
        v: Tensor = self.velocity(*state)
        self._first.setdefault(shape, (state, v))
        return v


def _remembering(model: Stepped) -> Stepped:
    """The model, changed; a velocity that sees the size of the step begins otherwise each time."""
    if (
        isinstance(model, OTTransformer)
        and model.depth == "ode"
        and not getattr(model.velocity, "timed", False)
    ):
        model.velocity = FirstKept(model.velocity)
    return model


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for each of torch's products."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
