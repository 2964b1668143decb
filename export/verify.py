"""Verification of a rung in the runtime that serves it, against the model in float64.

The tolerance follows from how far torch's own float32 is from float64 at that rung, so a long rung
of an ill-conditioned velocity is not failed for what no float32 runtime could do better. Weights,
activations and caches of 8 bits are rounded as much more coarsely as they have fewer bits.
"""

import numpy as np

from export.expected import Expected
from serve.bundle import Rung, Verified, steps_in_words
from serve.runtime import OpenedModel
from serve.runtime.margins import Present, present_positions
from serve.runtime.protocol import (
    Classifier,
    DecodeBatch,
    Decoder,
    FloatArray,
    IntArray,
    RowArray,
    Translator,
)
from train.model import PAD_ID

COARSER = 2.0**16  # 8 bits round to 2^-8 where float32 does to 2^-24
# Times torch's own float32 error, and times the largest logit: a few units in the last place.
SLACK, COARSE_SLACK = 16.0, COARSER
FLOOR, COARSE_FLOOR = 2e-6, 8 * 2.0**-8
CONTINUED_TOKENS = 24
EXTENDED_TOKENS = 3
ALONE_TOKENS = 5


class VerificationError(ValueError):
    """A rung whose graph does not compute what the model computes."""


def verify_rung(opened: OpenedModel, rung: Rung, answers: list[Expected]) -> Verified:
    """Every kind of call that serving makes, and every graph of the rung, on each sample."""
    manifest, steps = opened.bundle.manifest, rung.steps
    check = _Check(rung, manifest.rounds)
    whole = None if manifest.task == "translate" else opened.unrolled(steps)
    for expected in answers:
        rows = expected.inputs[0].numpy()
        check.begin(expected, present_positions(rows, manifest))
        match manifest.task:
            case "classify" | "tag":
                _verify_classifier(check, opened.classifier(steps), rows, "a batch")
                if manifest.step is not None:
                    _verify_classifier(check, opened.step_classifier(steps), rows, "single steps")
            case "generate":
                _verify_decoder(check, opened.decoder(steps), rows)
            case "translate":
                target = expected.inputs[1].numpy()
                _verify_translator(check, opened.translator(steps), rows, target)
        if whole is not None:
            check.compare(whole.forward(rows), "the whole graph")
    return check.verdict()


def _verify_classifier(check: "_Check", run: Classifier, rows: RowArray, what: str) -> None:
    together = run.run(rows)
    check.compare(together, what)
    if len(rows) > 1:
        check.same(together, [run.run(rows[i : i + 1]) for i in range(len(rows))], what)


def _verify_decoder(check: "_Check", run: Decoder, tokens: IntArray) -> None:
    forward = run.forward(tokens)
    check.compare(forward, "a prompt")
    rows, length = tokens.shape
    if length == 1:
        return
    start = max(1, length - CONTINUED_TOKENS)
    prompts = [max(1, start - row) for row in range(rows)]  # ragged on purpose
    logits = check.expected.copy()
    _decode(run.open_batch(), tokens, prompts, logits, length - max(prompts))
    check.compare(logits, "decoding")
    if rows > 1:
        check.same(forward, [run.forward(tokens[i : i + 1]) for i in range(rows)], "a prompt")
        alone = logits[:1].copy()
        few = min(ALONE_TOKENS, length - prompts[0])
        _decode(run.open_batch(), tokens[:1], prompts[:1], alone, few)
        check.same(logits[:1], [alone], "decoding")


def _decode(
    batch: DecodeBatch, tokens: IntArray, prompts: list[int], logits: FloatArray, count: int
) -> None:
    """Read the prompts and take in the logits of so many tokens more."""
    several = min(EXTENDED_TOKENS, count)
    for row, prompt in enumerate(prompts):
        logits[row, prompt - 1] = batch.add(tokens[row, :prompt])
    for row, prompt in enumerate(prompts):
        more = slice(prompt, prompt + several)
        logits[row, more] = batch.extend(row, tokens[row, more])
    _continue(batch, tokens, logits, count - several)


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
    """The differences seen so far at one rung."""

    def __init__(self, rung: Rung, coarse: bool) -> None:
        self.rung, self.coarse = rung, coarse
        self.error = self.float32_error = self.scale = 0.0
        self.worst = ""
        self.shape: tuple[int, ...] = ()
        self.present: Present | slice = slice(None)
        self.expected: FloatArray = np.zeros(0, dtype=np.float32)

    def begin(self, expected: Expected, present: Present | None = None) -> None:
        """What the next answers should be; of a tagger, at the positions that are no padding."""
        self.present = slice(None) if present is None else present
        self.shape = tuple(expected.inputs[-1].shape)
        self.reference = expected.logits
        self.expected = expected.logits.astype(np.float32)
        self.float32_error = max(self.float32_error, expected.float32_error)
        self.scale = max(self.scale, expected.scale)

    def compare(self, logits: FloatArray, what: str) -> None:
        """Take in the difference of what the runtime gave."""
        apart = np.abs(logits.astype(np.float64) - self.reference)[self.present]
        difference = float(apart.max())
        if not difference <= self.error:  # also true for NaN
            self.error, self.worst = difference, f"{what} of shape {self.shape}"

    def same(self, together: FloatArray, alone: list[FloatArray], what: str) -> None:
        """That rows are answered bit for bit as they are without the others."""
        if not np.array_equal(together, np.concatenate(alone)):
            difference = float(np.abs(together - np.concatenate(alone)).max())
            raise VerificationError(
                f"{self._where} answers a row in {what} of shape {self.shape} otherwise than "
                f"alone, by {difference:.3g}. No bundle was kept."
            )

    def verdict(self) -> Verified:
        slack, floor = (COARSE_SLACK, COARSE_FLOOR) if self.coarse else (SLACK, FLOOR)
        tolerance = slack * self.float32_error + floor * self.scale
        if not self.error <= tolerance:
            raise VerificationError(
                f"{self._where} is off by {self.error:.3g} in {self.worst}, above its tolerance "
                f"{tolerance:.3g} (torch float32 is within {self.float32_error:.3g} of float64). "
                "No bundle was kept."
            )
        return Verified(self.error, tolerance, self.float32_error)

    @property
    def _where(self) -> str:
        return f"the rung of {steps_in_words(self.rung.steps)} ({self.rung.method})"
