"""What a model answers at a rung, in float64 and in float32: what its graphs are held against.

Knows models and samples; not how a graph is run or how far it may be off.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.samples import Inputs
from serve.bundle import Rung
from train.model import Stepped


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer to one sample at one rung."""

    inputs: Inputs
    logits: NDArray[np.float64]
    float32_error: float  # the farthest that torch's own float32 is from these

    @property
    def scale(self) -> float:
        return float(np.abs(self.logits).max())


@dataclass(frozen=True, slots=True)
class References:
    """A model in both precisions, and the samples that it answers."""

    single: Stepped
    double: Stepped
    samples: Sequence[Inputs]


def references_of(model: Stepped, samples: Sequence[Inputs]) -> References:
    """The references of a model in float32."""
    return References(model.eval(), copy.deepcopy(model).double(), samples)


def expected_answers(references: References, rung: Rung) -> list[Expected]:
    """The answers to all samples."""
    return [_expected(references, inputs, rung) for inputs in references.samples]


def _expected(references: References, inputs: Inputs, rung: Rung) -> Expected:
    logits = _logits(references.double, inputs, rung)
    error = (_logits(references.single, inputs, rung).double() - logits).abs().max()
    return Expected(inputs, logits.numpy(), float(error))


def _logits(model: Stepped, inputs: Inputs, rung: Rung) -> Tensor:
    kind = next(model.parameters()).dtype
    cast = (each.to(kind) if each.is_floating_point() else each for each in inputs)
    with torch.no_grad():
        logits: Tensor = model(*cast, steps=rung.steps, method=rung.method).logits
    return logits
