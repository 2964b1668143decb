"""Modules through torch's exporter: right at any size, and traced twice only where they must be."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torch.onnx._internal.exporter import _core

from export import pieces
from export.pieces import OPSET, to_onnx
from train.blocks import FeedForward, RootNorm


class _Scaled(nn.Module):
    """With a whole number that has to become a float."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feedforward = RootNorm(8, 1e-6), FeedForward(8, 16)

    def forward(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs  # (B, N, 8)
        y: Tensor = self.feedforward(self.norm(x)) * x.shape[1]
        y = y + x.split(4, dim=-1)[0].sum(-1, keepdim=True)
        return y


class _Halved(nn.Module):
    """With an op that has no form in ONNX, and one that changes a tensor in place."""

    def forward(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        y = x.to(torch.float64).to(torch.float32).clone()
        y.mul_(0.5)
        return y


@pytest.mark.parametrize(
    ("module", "known", "prepared"),
    [(_Scaled(), torch.__version__, 0), (_Halved(), torch.__version__, 1), (_Scaled(), "1.", 1)],
    ids=["quick", "thorough", "another torch"],
)
def test_a_graph_answers_as_the_module_does(
    module: nn.Module, known: str, prepared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_KNOWN", known)
    prepare, calls = _core._prepare_exported_program_for_export, []

    def counted(*arguments: object, **named: object) -> object:
        calls.append(arguments)
        return prepare(*arguments, **named)  # type: ignore[arg-type]  # what came is passed on

    monkeypatch.setattr(_core, "_prepare_exported_program_for_export", counted)
    graph = to_onnx(module.eval(), (torch.randn(1, 3, 8),), [(0, 1)])
    assert len(calls) == prepared
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for shape in ((1, 1, 8), (2, 3, 8), (3, 17, 8)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected = module(x).numpy()
        (found,) = session.run(None, {graph.input[0].name: x.numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-5)
