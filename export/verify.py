"""Verification of a rung in the runtime that serves it, against the model in float64.

The tolerance follows from how far torch's own float32 is from float64 at that rung, so a long rung
of an ill-conditioned velocity is not failed for what no float32 runtime could do better. Weights
and activations of 8 bits are rounded as much more coarsely as they have fewer bits.
"""

import copy

import numpy as np
import torch
from torch import Tensor

from export.samples import Inputs
from serve.bundle import Precision, Rung, Verified
from serve.runtime.protocol import (
    Classifier,
    DecodeBatch,
    Decoder,
    FloatArray,
    IntArray,
    OpenedModel,
    Translator,
)
from train.build import PAD_ID
from train.model import Stepped

COARSER = 2.0**16  # 8 bits round to 2^-8 where float32 does to 2^-24
# Times torch's own float32 error, and times the largest logit: a few units in the last place.
SLACK: dict[Precision, float] = {"fp32": 16.0, "int8": COARSER}
FLOOR: dict[Precision, float] = {"fp32": 2e-6, "int8": 8 * 2.0**-8}
CONTINUED_TOKENS = 24
EXTENDED_TOKENS = 3


class VerificationError(ValueError):
    """A rung whose graph does not compute what the model computes."""


def verify_rung(model: Stepped, opened: OpenedModel, rung: Rung, samples: list[Inputs]) -> Verified:
    """Every kind of call that serving makes, and every graph of the rung, on each sample."""
    manifest, steps = opened.bundle.manifest, rung.steps
    check = _Check(model, rung.method, steps, manifest.precision)
    whole = None if manifest.task == "translate" else opened.unrolled(steps)
    for inputs in samples:
        check.begin(inputs)
        rows = inputs[0].numpy()
        match manifest.task:
            case "classify":
                _verify_classifier(check, opened.classifier(steps), rows)
                if manifest.step is not None:
                    check.compare(opened.step_classifier(steps).run(rows), "single steps")
            case "generate":
                _verify_decoder(check, opened.decoder(steps), rows)
            case "translate":
                _verify_translator(check, opened.translator(steps), rows, inputs[1].numpy())
        if whole is not None:
            check.compare(whole.forward(rows), "the whole graph")
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
    several = min(EXTENDED_TOKENS, length - max(prompts))
    for row, prompt in enumerate(prompts):
        more = slice(prompt, prompt + several)
        logits[row, more] = batch.extend(row, tokens[row, more])
    _continue(batch, tokens, logits, length - max(prompts) - several)
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
    def __init__(self, model: Stepped, method: str, steps: int, precision: Precision) -> None:
        self.double = copy.deepcopy(model).double().eval()
        self.single = model.eval()
        self.method, self.steps, self.precision = method, steps, precision
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
        slack, floor = SLACK[self.precision], FLOOR[self.precision]
        tolerance = slack * self.float32_error + floor * self.scale
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
