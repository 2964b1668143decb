"""What the parity tests share: every model is traced once, and latency is measured in an instant.

Tracing is the slow part of an export, and the same for every method and step count.
"""

from collections.abc import Sequence

import pytest
from torch import Tensor

from export.pieces import EXPORTER
from export.trace import Traced, trace
from train.model import Stepped

_TRACED: dict[object, Traced] = {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(
        model: Stepped, small: Sequence[Tensor], large: Sequence[Tensor], labelled: bool
    ) -> Traced:
        weights = tuple(float(p.detach().double().sum()) for p in model.parameters())
        key = (model.depth, model.T, model.dial, model.full, weights)
        if key not in _TRACED:
            _TRACED[key] = trace(model, small, large, labelled)
        return _TRACED[key]

    def twice(*_: object, **__: object) -> None:
        pytest.fail("the model has an op without a form in ONNX: torch traces it a second time")

    monkeypatch.setattr("export.run.trace", traced)
    monkeypatch.setattr(f"{EXPORTER}._core._prepare_exported_program_for_export", twice)
    monkeypatch.setattr("export.latency.ENOUGH_S", 0.0)
    monkeypatch.setattr("export.latency.ENOUGH_RUNS", 1)
