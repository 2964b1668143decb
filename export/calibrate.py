"""Calibration: quality of every rung on held-out data, in the runtime that serves.

Says which rungs are worth their cost, and what the effort words and the default mean. Knows nothing
of time: the cost of a rung is its steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from export.words import TOLERATED
from serve.bundle import Effort, Manifest, Metric, PointsInput, Quality, Range, Rung, TextInput
from serve.runtime import Model
from serve.runtime.protocol import FloatArray
from train.data.batch import Batch, Dataset
from train.quality import Z95, Tally

EVALUATION_TOKENS = 8192  # positions of one evaluation batch
EVALUATION_LOGITS = 1 << 26  # numbers in its logits
EVALUATION_IMAGES = 256


class Measured(NamedTuple):
    """Quality of a rung, and what it is made of."""

    quality: Quality
    per_row: Tensor  # (R,): of each held-out row; the quality is their mean


def held_out_batches(dataset: Dataset, manifest: Manifest, samples: int | None) -> Iterable[Batch]:
    """The held-out split, whole, or about `samples` of its rows."""
    size = _batch_rows(manifest)
    if samples is not None:
        size = min(size, max(2, samples))  # an interval needs two
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
                vocabulary = len(manifest.labels or ()) or manifest.text_tokenizer.vocab_size
                tokens = min(tokens, EVALUATION_LOGITS // vocabulary)
            return max(1, tokens // longest)
        case PointsInput(max_points=most):
            return max(4, EVALUATION_TOKENS // most)
        case _:
            return EVALUATION_IMAGES


def measure_rung(opened: Model, steps: int, batches: Iterable[Batch]) -> Measured:
    """Quality of a rung; of a translator, that of the true next token."""
    labelled = opened.bundle.manifest.labelled
    tally = Tally()
    for batch in batches:
        tally.add(batch, torch.from_numpy(logits_of(opened, steps, batch)), 0.0)
    return measured_by(tally, labelled)


def measured_by(tally: Tally, labelled: bool) -> Measured:
    """What a tally found."""
    quality = tally.quality(labelled)
    metric: Metric = "accuracy" if labelled else "loss"
    return Measured(
        Quality(metric, quality.value, quality.low, quality.high, quality.samples, quality.whole),
        tally.per_row(labelled),
    )


def logits_of(opened: Model, steps: int, batch: Batch) -> FloatArray:
    inputs = [each.contiguous().numpy() for each in batch.inputs]
    match opened.bundle.manifest.task:
        case "classify" | "tag":
            return opened.classifier(steps).run(inputs[0])
        case "generate":
            return opened.decoder(steps).forward(inputs[0])
        case "translate":
            return opened.translator(steps).forward(*inputs)


def dominated(measured: dict[int, Measured]) -> set[int]:
    """Rungs beside which fewer steps have at least as good a measured value."""
    sign, best, beaten = _sign(measured), -math.inf, set()
    for steps in sorted(measured):
        value = sign * measured[steps].quality.value
        if value > best:
            best = value
        else:
            beaten.add(steps)
    return beaten


def named_rungs(rungs: tuple[Rung, ...], measured: dict[int, Measured]) -> tuple[Rung, ...]:
    """The rungs with their words; a dominated one is marked and has none."""
    beaten = dominated(measured)
    efforts = name_efforts([rung.steps for rung in rungs if rung.steps not in beaten])
    return tuple(
        dataclasses.replace(rung, effort=efforts.get(rung.steps), dominated=rung.steps in beaten)
        for rung in rungs
    )


def name_efforts(steps: list[int]) -> dict[int, Effort]:
    """low and max are the ends of these; medium and high lie between, where there is room."""
    named: dict[int, Effort] = {steps[-1]: "max"}
    if len(steps) > 1:
        named[steps[0]] = "low"
    if len(steps) > 2:
        named[steps[max(1, (len(steps) - 1) // 3)]] = "medium"
    if len(steps) > 3:
        named[steps[-2]] = "high"
    return named


def choose_default(measured: dict[int, Measured]) -> int:
    """The fewest steps that are as good as the best measured ones, row by row.

    Never a dominated rung: what a request gets unasked should not cost more than what a word
    names for at least the same measured quality. The best is never dominated, so there is one.
    """
    sign, beaten = _sign(measured), dominated(measured)
    kept = sorted(steps for steps in measured if steps not in beaten)
    best = measured[kept[-1]]
    return next(steps for steps in kept if _as_good(measured[steps], best, sign))


def _sign(measured: dict[int, Measured]) -> int:
    return -1 if next(iter(measured.values())).quality.metric == "loss" else 1


def range_of(measured: dict[int, Measured]) -> Range | None:
    """What the most steps are better than the fewest by; None of one rung, or of one row."""
    fewest, most = (measured[pick(measured)] for pick in (min, max))
    ahead, spread = _ahead(most, fewest, _sign(measured))
    if most is fewest or spread == math.inf:
        return None
    return Range(ahead, ahead - spread, ahead + spread)


def _as_good(rung: Measured, best: Measured, sign: int) -> bool:
    """Whether the best is ahead by no more than is tolerated, with 95 % confidence.

    Few rows leave the difference open, and then the best is kept.
    """
    ahead, spread = _ahead(best, rung, sign)
    return rung is best or ahead + spread <= TOLERATED[best.quality.metric]


def _ahead(one: Measured, other: Measured, sign: int) -> tuple[float, float]:
    """By how much one is better, row by row on the same rows, and half its 95 % interval."""
    ahead = sign * (one.per_row - other.per_row)  # (R,)
    spread = Z95 * float(ahead.std()) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.inf
    return float(ahead.mean()), spread
