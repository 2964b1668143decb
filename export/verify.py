"""Verification of a rung in the runtime that serves it, against the model in float64.

The tolerance follows from how far torch's own float32 is from float64 at that rung, so a long rung
of an ill-conditioned velocity is not failed for what no float32 runtime could do better.
"""

import copy

import numpy as np
import torch
from torch import Tensor

from export.samples import Inputs
from serve.bundle import Rung, Verified
from serve.runtime.protocol import (
    Classifier,
    DecodeBatch,
    Decoder,
    FloatArray,
    IntArray,
    Model,
    Translator,
)
from train.build import PAD_ID
from train.model import Stepped

SLACK = 16.0  # times torch's own float32 error
FLOOR = 2e-6  # times the largest logit: a few units in the last place of float32
CONTINUED_TOKENS = 24


class VerificationError(ValueError):
    """A rung whose graph does not compute what the model computes."""


def verify_rung(model: Stepped, opened: Model, rung: Rung, samples: list[Inputs]) -> Verified:
    """Every kind of call that serving makes, on each sample, against float64."""
    check = _Check(model, rung.method, rung.steps)
    for inputs in samples:
        check.begin(inputs)
        match opened.bundle.manifest.task:
            case "classify":
                _verify_classifier(check, opened.classifier(rung.steps), inputs[0].numpy())
            case "generate":
                _verify_decoder(check, opened.decoder(rung.steps), inputs[0].numpy())
            case "translate":
                source, target = (tokens.numpy() for tokens in inputs)
                _verify_translator(check, opened.translator(rung.steps), source, target)
    return check.verdict()


def _verify_classifier(check: "_Check", run: Classifier, rows: FloatArray | IntArray) -> None:
    check.compare(run.run(rows), "a batch")
    alone = [run.run(rows[i : i + 1]) for i in range(len(rows))]
    check.compare(np.concatenate(alone), "rows alone")


def _verify_decoder(check: "_Check", run: Decoder, tokens: IntArray) -> None:
    check.compare(run.forward(tokens), "a prompt")
    rows, length = tokens.shape
    if length == 1:
        return
    start = max(1, length - CONTINUED_TOKENS)
    prompts = [max(1, start - row) for row in range(rows)]  # ragged on purpose
    batch, logits = run.open_batch(), check.expected.copy()
    for row, prompt in enumerate(prompts):
        logits[row, prompt - 1] = batch.add(tokens[row, :prompt])
    _continue(batch, tokens, logits, length - max(prompts))
    check.compare(logits, "decoding")


def _verify_translator(
    check: "_Check", run: Translator, source: IntArray, tokens: IntArray
) -> None:
    check.compare(run.forward(source, tokens), "pairs")
    batch, logits = run.open_batch(), check.expected.copy()
    for row, ids in enumerate(source):
        logits[row, 0] = batch.add(ids[ids != PAD_ID])
    _continue(batch, tokens, logits, min(CONTINUED_TOKENS, tokens.shape[1] - 1))
    check.compare(logits, "translating")


def _continue(batch: DecodeBatch, tokens: IntArray, logits: FloatArray, count: int) -> None:
    """Take in the logits of that many tokens more, row by row as they are."""
    rows = np.arange(len(tokens))
    for _ in range(count):
        at = np.array(batch.lengths)
        logits[rows, at] = batch.step(tokens[rows, at])


class _Check:
    def __init__(self, model: Stepped, method: str, steps: int) -> None:
        self.double = copy.deepcopy(model).double().eval()
        self.single = model.eval()
        self.method, self.steps = method, steps
        self.error = self.float32_error = self.scale = 0.0
        self.worst = ""
        self.shape: tuple[int, ...] = ()
        self.expected: FloatArray = np.zeros(0, dtype=np.float32)

    def begin(self, inputs: Inputs) -> None:
        """The inputs that the next answers are for."""
        self.shape = tuple(inputs[-1].shape)
        self.reference = self._logits(self.double, inputs)
        single = self._logits(self.single, inputs).double()
        self.expected = self.reference.float().numpy()
        error = float((single - self.reference).abs().max())
        self.float32_error = max(self.float32_error, error)
        self.scale = max(self.scale, float(self.reference.abs().max()))

    def compare(self, logits: FloatArray, what: str) -> None:
        """Take in the difference of what the runtime gave."""
        difference = float(np.abs(logits.astype(np.float64) - self.reference.numpy()).max())
        if not difference <= self.error:  # also true for NaN
            self.error, self.worst = difference, f"{what} of shape {self.shape}"

    def verdict(self) -> Verified:
        tolerance = SLACK * self.float32_error + FLOOR * self.scale
        if not self.error <= tolerance:
            raise VerificationError(
                f"the rung of {self.steps} steps ({self.method}) is off by {self.error:.3g} in "
                f"{self.worst}, above its tolerance {tolerance:.3g} (torch float32 is within "
                f"{self.float32_error:.3g} of float64). No bundle was kept."
            )
        return Verified(self.error, tolerance, self.float32_error)

    def _logits(self, model: Stepped, inputs: Inputs) -> Tensor:
        kind = next(model.parameters()).dtype
        cast = (each.to(kind) if each.is_floating_point() else each for each in inputs)
        with torch.no_grad():
            logits: Tensor = model(*cast, steps=self.steps, method=self.method).logits
        return logits
