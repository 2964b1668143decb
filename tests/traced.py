"""Whether a torch module survives the exporter: traced, run by ONNX Runtime, compared with torch.

Knows nothing of bundles or of how a model is cut into graphs.
"""

import logging
import warnings
from collections.abc import Sequence

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn


def check_trace(
    module: nn.Module,
    traced_with: Sequence[Tensor],
    dynamic: Sequence[Sequence[int]],
    run_with: Sequence[Tensor],
    atol: float = 2e-5,
) -> None:
    """Trace with some inputs whose listed dimensions vary; run with others; fail if they differ."""
    shapes = [{i: torch.export.Dim.DYNAMIC for i in axes} for axes in dynamic]
    module.eval()
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():  # the exporter warns of its own deprecations
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                tuple(traced_with),
                dynamo=True,
                dynamic_shapes={"inputs": tuple(shapes)},
                opset_version=21,
                verbose=False,
            )
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
    assert program is not None
    graph = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    answers = session.run(None, {n: v.numpy() for n, v in zip(names, run_with, strict=True)})
    with torch.no_grad():
        expected = module(*run_with)
    for answer, tensor in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, tensor.numpy(), atol=atol)
