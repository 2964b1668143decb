"""Verification of a rung in the runtime that serves it, against the model in float64.

The tolerance follows from how far torch's own float32 is from float64 at that rung, so a long rung
of an ill-conditioned velocity is not failed for what no float32 runtime could do better.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from serve.bundle import Verified
from serve.runtime.protocol import Classifier, Decoder, FloatArray, IntArray
from train.model import OTTransformer

SLACK = 16.0  # times torch's own float32 error
FLOOR = 2e-6  # times the largest logit: a few units in the last place of float32
CONTINUED_TOKENS = 24


class VerificationError(ValueError):
    """A rung whose graph does not compute what the model computes."""


def verify_classifier(
    model: OTTransformer, run: Classifier, method: str, steps: int, samples: list[IntArray]
) -> Verified:
    """Whole batches against float64, and each row alone against the row in its batch."""
    check = _Check(model, method, steps)
    for tokens in samples:
        together = run.run(tokens)
        check.compare(tokens, together, "a batch")
        alone = np.concatenate([run.run(tokens[i : i + 1]) for i in range(len(tokens))])
        check.compare(tokens, alone, "rows alone")
    return check.verdict()


def verify_decoder(
    model: OTTransformer, run: Decoder, method: str, steps: int, samples: list[IntArray]
) -> Verified:
    """Every position against float64, and ragged cached decoding against it too."""
    check = _Check(model, method, steps)
    for tokens in samples:
        check.compare(tokens, run.forward(tokens), "a prompt")
        if tokens.shape[1] > 1:
            check.compare(tokens, _decoded(run, tokens, check.expected), "cached decoding")
    return check.verdict()


def _decoded(run: Decoder, tokens: IntArray, expected: FloatArray) -> FloatArray:
    """Logits of ragged prompts continued token by token with the cache; the rest as expected."""
    rows, length = tokens.shape
    logits = expected.copy()
    batch = run.open_batch()
    start = max(1, length - CONTINUED_TOKENS)
    prompts = [max(1, start - row) for row in range(rows)]  # ragged on purpose
    for row, prompt in enumerate(prompts):
        logits[row, prompt - 1] = batch.add(tokens[row, :prompt])
    for _ in range(length - max(prompts)):
        at = np.array(batch.lengths)
        out = batch.step(tokens[np.arange(rows), at])
        logits[np.arange(rows), at] = out
    return logits


class _Check:
    def __init__(self, model: OTTransformer, method: str, steps: int) -> None:
        self.double = copy.deepcopy(model).double().eval()
        self.single = model.eval()
        self.method, self.steps = method, steps
        self.error = self.float32_error = self.scale = 0.0
        self.worst = ""
        self.expected: FloatArray = np.zeros(0, dtype=np.float32)

    def compare(self, tokens: IntArray, logits: FloatArray, what: str) -> None:
        """Take in the difference of what the runtime gave for these tokens."""
        reference = self._logits(self.double, tokens)
        single = self._logits(self.single, tokens)
        self.expected = reference.float().numpy()
        self.float32_error = max(self.float32_error, float((single - reference).abs().max()))
        self.scale = max(self.scale, float(reference.abs().max()))
        difference = float(np.abs(logits.astype(np.float64) - reference.numpy()).max())
        if not difference <= self.error:  # also true for NaN
            self.error, self.worst = difference, f"{what} of shape {tokens.shape}"

    def verdict(self) -> Verified:
        tolerance = SLACK * self.float32_error + FLOOR * self.scale
        if not self.error <= tolerance:
            raise VerificationError(
                f"the rung of {self.steps} steps ({self.method}) is off by {self.error:.3g} in "
                f"{self.worst}, above its tolerance {tolerance:.3g} (torch float32 is within "
                f"{self.float32_error:.3g} of float64). No bundle was kept."
            )
        return Verified(self.error, tolerance, self.float32_error)

    def _logits(self, model: OTTransformer, tokens: IntArray) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.from_numpy(tokens), self.steps, self.method).logits
        return logits.double()


Sampler = Callable[[int, int], IntArray]  # (rows, length) -> tokens


def edge_samples(sample: Sampler, max_tokens: int) -> list[IntArray]:
    """Shapes at the edges: one token, the whole window, one row and several."""
    shapes = {(1, 1), (3, min(17, max_tokens)), (2, max_tokens)}
    return [sample(rows, length) for rows, length in sorted(shapes)]
