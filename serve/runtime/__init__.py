"""Runs bundles. The only package that imports onnxruntime or tensorrt."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from serve.runtime.protocol import (
    Batches,
    Classifier,
    DecodeBatch,
    Decoder,
    Device,
    EarlyAnswers,
    Mix,
    Model,
    OpenedModel,
    Prefill,
    RunningTranslation,
    Speculation,
    StepClassifier,
    SteppedBatch,
    Translator,
    WindowFullError,
)

if TYPE_CHECKING:
    from serve.bundle import Bundle

# onnxruntime since 1.29 reports the models it opens to its makers, unless this is set before it is
# loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "Batches",
    "Classifier",
    "DecodeBatch",
    "Decoder",
    "Device",
    "EarlyAnswers",
    "Mix",
    "Model",
    "OpenedModel",
    "Prefill",
    "RunningTranslation",
    "Speculation",
    "StepClassifier",
    "SteppedBatch",
    "Translator",
    "WindowFullError",
    "open_model",
]

_CPU = Device()


def open_model(bundle: Bundle, threads: int | None = None, device: Device = _CPU) -> OpenedModel:
    """Open a bundle for running, with `threads` threads a call (default: the usable cores)."""
    # Imported here, so that reading a bundle or a Protocol loads no runtime.
    if device.engines is not None:
        from serve.runtime.tensorrt import TrtModel, engines_of

        return TrtModel(bundle, engines_of(device.engines, bundle), device.number)
    from serve.runtime.model import OrtModel

    return OrtModel(bundle, threads, device)
