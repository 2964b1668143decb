"""Every model is traced once in a process.

Tracing is the slow part of an export, and the same for every method, step count and precision.
"""

from collections.abc import Sequence

import pytest
from torch import Tensor

from export.trace import Traced, trace
from train.model import Stepped

_TRACED: dict[object, Traced] = {}


def trace_once(patch: pytest.MonkeyPatch) -> None:
    """While the patch lasts, an export of a model that was exported before does not trace it."""

    def traced(
        model: Stepped, small: Sequence[Tensor], large: Sequence[Tensor], labelled: bool
    ) -> Traced:
        weights = tuple(float(p.detach().double().sum()) for p in model.parameters())
        key = (model.depth, model.T, model.dial, model.full, weights)
        if key not in _TRACED:
            _TRACED[key] = trace(model, small, large, labelled)
        return _TRACED[key]

    patch.setattr("export.run.trace", traced)
