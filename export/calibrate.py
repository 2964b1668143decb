"""Calibration: quality of every rung on held-out data, in the runtime that serves.

Chooses what the effort words and the default mean. Knows nothing of time.
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve.bundle import Effort, Manifest, Metric, PointsInput, Quality, TextInput
from serve.runtime.protocol import FloatArray, Model
from train.batch import Batch, Dataset
from train.quality import Z95, Tally

EVALUATION_TOKENS = 8192  # positions of one evaluation batch
EVALUATION_LOGITS = 1 << 26  # numbers in its logits
EVALUATION_IMAGES = 256
TOLERATED: dict[str, float] = {"loss": 0.01, "accuracy": 0.005}  # nats, or a share of the rows


class Measured(NamedTuple):
    """Quality of a rung, and what it is made of."""

    quality: Quality
    per_row: Tensor  # (R,): of each held-out row; the quality is their mean


def held_out_batches(dataset: Dataset, manifest: Manifest, samples: int | None) -> Iterable[Batch]:
    """The held-out split, whole, or about `samples` of its rows."""
    size = _batch_rows(manifest)
    batches: Iterable[Batch] = dataset.held_out(size)
    if samples is None:
        return batches
    if manifest.task == "generate":
        return itertools.islice(batches, max(1, samples // size))
    every = list(batches)  # in order of length: take batches all over
    wanted = max(1, min(len(every), samples // size))
    return [every[i] for i in np.linspace(0, len(every) - 1, wanted).round().astype(int)]


def _batch_rows(manifest: Manifest) -> int:
    match manifest.input:
        case TextInput(max_tokens=most):
            longest, tokens = max(most, manifest.target_max_tokens or 0), EVALUATION_TOKENS
            if manifest.task != "classify":  # logits at every position
                vocabulary = manifest.text_tokenizer.vocab_size
                tokens = min(tokens, EVALUATION_LOGITS // vocabulary)
            return max(1, tokens // longest)
        case PointsInput(max_points=most):
            return max(4, EVALUATION_TOKENS // most)
        case _:
            return EVALUATION_IMAGES


def measure_rung(opened: Model, steps: int, batches: Iterable[Batch]) -> Measured:
    """Quality of a rung; of a translator, that of the true next token."""
    labelled = opened.bundle.manifest.task == "classify"
    tally = Tally()
    for batch in batches:
        tally.add(batch, torch.from_numpy(_logits(opened, steps, batch)), 0.0)
    quality = tally.quality(labelled)
    metric: Metric = "accuracy" if labelled else "loss"
    return Measured(
        Quality(metric, quality.value, quality.low, quality.high, quality.samples),
        tally.per_row(labelled),
    )


def _logits(opened: Model, steps: int, batch: Batch) -> FloatArray:
    inputs = [each.contiguous().numpy() for each in batch.inputs]
    match opened.bundle.manifest.task:
        case "classify":
            return opened.classifier(steps).run(inputs[0])
        case "generate":
            return opened.decoder(steps).forward(inputs[0])
        case "translate":
            return opened.translator(steps).forward(*inputs)


def name_efforts(steps: list[int]) -> dict[int, Effort]:
    """low and max are the ends of the ladder; medium and high lie between, where there is room."""
    named: dict[int, Effort] = {steps[-1]: "max"}
    if len(steps) > 1:
        named[steps[0]] = "low"
    if len(steps) > 2:
        named[steps[max(1, (len(steps) - 1) // 3)]] = "medium"
    if len(steps) > 3:
        named[steps[-2]] = "high"
    return named


def choose_default(measured: dict[int, Measured]) -> int:
    """The fewest steps that are as good as the best measured ones, row by row."""
    sign = -1 if next(iter(measured.values())).quality.metric == "loss" else 1
    best = max(measured, key=lambda steps: (sign * measured[steps].quality.value, -steps))
    return min(steps for steps in measured if _as_good(measured[steps], measured[best], sign))


def _as_good(rung: Measured, best: Measured, sign: int) -> bool:
    """Whether the best is ahead by no more than is tolerated, with 95 % confidence.

    Few rows leave the difference open, and then the best is kept.
    """
    ahead = sign * (best.per_row - rung.per_row)  # (R,)
    spread = Z95 * float(ahead.std()) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.inf
    return rung is best or float(ahead.mean()) + spread <= TOLERATED[best.quality.metric]
