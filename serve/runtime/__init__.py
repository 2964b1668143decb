"""Runs bundles. The only package that imports onnxruntime or tensorrt."""

import os

from serve.bundle import Bundle
from serve.runtime.protocol import (
    CPU,
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
    WindowFullError,
)

# onnxruntime since 1.29 reports the models it opens to its makers, unless this is set before it is
# loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def open_model(bundle: Bundle, threads: int | None = None, device: Device = CPU) -> OpenedModel:
    """Open a bundle for running, with `threads` threads a call (default: the usable cores)."""
    # Imported here, so that reading a bundle or a Protocol loads no runtime.
    if device.engines is not None:
        from serve.runtime.tensorrt import TrtModel, engines_of

        return TrtModel(bundle, engines_of(device.engines, bundle), device.number)
    from serve.runtime.model import OrtModel

    return OrtModel(bundle, threads, device)
