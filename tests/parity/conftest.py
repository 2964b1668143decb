"""Of the parity tests: every model is traced once, and latency is measured in an instant."""

import pytest

from export.pieces import EXPORTER
from tests.tracing import trace_once


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: object, **__: object) -> None:
        pytest.fail("the model has an op without a form in ONNX: torch traces it a second time")

    trace_once(monkeypatch)
    monkeypatch.setattr(f"{EXPORTER}._core._prepare_exported_program_for_export", twice)
    monkeypatch.setattr("export.latency.ENOUGH_S", 0.0)
    monkeypatch.setattr("export.latency.ENOUGH_RUNS", 1)
