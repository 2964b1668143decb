"""Quality of every rung on held-out data, in the runtime that serves. Needs no torch."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from export.inspect import TOLERATED, flat_in_words, range_in_words
from serve.bundle import (
    AgainstFp32,
    Bundle,
    BundleError,
    Effort,
    ImageInput,
    Manifest,
    Metric,
    PointsInput,
    Quality,
    Range,
    Rung,
    TextInput,
)
from serve.runtime import Model, open_model
from serve.runtime.protocol import FloatArray
from train.data import open_measured
from train.data.batch import IGNORED, Batch, Dataset
from train.recipe import AS_TRAINED, Columns, RecipeError, data_at, recipe_from
from train.tally import PerRow, Sums, half_interval

EVALUATION_TOKENS = 8192  # positions of one evaluation batch
EVALUATION_LOGITS = 1 << 26  # numbers in its logits
EVALUATION_IMAGES = 256
_PORTIONS = 16  # some rows are so many batches at least, of rows of all lengths


class Measured(NamedTuple):
    """Quality of a rung, and what it is made of."""

    quality: Quality
    per_row: PerRow  # (R,): of each held-out row; the quality is their mean
    macro_f1: float | None = None  # of one answer a row: the mean F1 of the classes


def held_out_batches(dataset: Dataset, manifest: Manifest, samples: int | None) -> Iterable[Batch]:
    """The held-out split, whole, or about `samples` of its rows."""
    size = _batch_rows(manifest)
    if samples is not None:
        portions = 1 if manifest.task == "generate" else _PORTIONS
        size = min(size, max(2, samples // portions))  # an interval needs two
    batches: Iterable[Batch] = dataset.held_out(size)
    if samples is None:
        return batches
    if manifest.task == "generate":
        return itertools.islice(batches, max(1, samples // size))
    every = list(batches)  # in order of length: take batches all over
    wanted = max(1, min(len(every), round(samples / size)))
    return [every[int((i + 0.5) * len(every) / wanted)] for i in range(wanted)]


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
    tally = Sums()
    for batch in batches:
        add_answers(tally, batch, logits_of(opened, steps, batch))
    return measured_by(tally, labelled)


def add_answers(tally: Sums, batch: Batch, logits: FloatArray) -> None:
    """Count a batch and its logits (B, classes), or (B, N, classes)."""
    targets = np.asarray(batch.targets)
    rows, classes = batch.rows, logits.shape[-1]
    counted = targets != IGNORED
    answers = logits.argmax(-1)
    apart = logits - logits.max(-1, keepdims=True)  # float32: no exponential overflows
    chosen = np.where(counted, targets, 0).reshape(-1, 1)
    right = np.take_along_axis(apart.reshape(-1, classes), chosen, 1)[:, 0]
    np.exp(apart, out=apart)
    if targets.ndim == 1:
        tally.pairs.update(zip(targets.tolist(), answers.tolist(), strict=True))
    losses = np.where(counted.reshape(-1), np.log(apart.sum(-1)).reshape(-1) - right, 0)
    tally.add_rows(
        losses.reshape(rows, -1).sum(1).tolist(),
        counted.reshape(rows, -1).sum(1).tolist(),
        (counted & (answers == targets)).reshape(rows, -1).sum(1).tolist(),
        0.0,
    )


def measured_by(tally: Sums, labelled: bool) -> Measured:
    """What a tally found."""
    quality = tally.quality(labelled)
    metric: Metric = "accuracy" if labelled else "loss"
    return Measured(
        Quality(metric, quality.value, quality.low, quality.high, quality.samples, quality.whole),
        tally.per_row(labelled),
        quality.macro_f1,
    )


def logits_of(opened: Model, steps: int, batch: Batch) -> FloatArray:
    inputs = [np.ascontiguousarray(np.asarray(each)) for each in batch.inputs]
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
    """The fewest steps that are not shown to be worse than the best by more than is tolerated.

    Row by row, with 95 % confidence; few rows show little, and then fewer steps are the default.
    Never a dominated rung: what a request gets unasked should not cost more than what a word
    names for at least the same measured quality. The best is never dominated, so there is one.
    """
    sign, beaten = _sign(measured), dominated(measured)
    kept = sorted(steps for steps in measured if steps not in beaten)
    best = measured[kept[-1]]
    return next(steps for steps in kept if not _worse(measured[steps], best, sign))


def _sign(measured: dict[int, Measured]) -> int:
    return -1 if next(iter(measured.values())).quality.metric == "loss" else 1


def range_of(measured: dict[int, Measured]) -> Range | None:
    """What the most steps are better than the fewest by; None of one rung, or of one row."""
    fewest, most = (measured[pick(measured)] for pick in (min, max))
    ahead, spread = _ahead(most, fewest, _sign(measured))
    if most is fewest or spread == math.inf:
        return None
    low, high = ahead - spread, ahead + spread
    if most.quality.metric == "accuracy":  # a share, whatever an interval of few rows is
        low, high = max(low, -1.0), min(high, 1.0)
    return Range(ahead, low, high)


def _worse(rung: Measured, best: Measured, sign: int) -> bool:
    """Whether the best is shown to be ahead by more than is tolerated, with 95 % confidence."""
    ahead, spread = _ahead(best, rung, sign)
    return rung is not best and ahead - spread > TOLERATED[best.quality.metric]


def _ahead(one: Measured, other: Measured, sign: int) -> tuple[float, float]:
    """By how much one is better, row by row on the same rows, and half its 95 % interval."""
    ahead = sign * (one.per_row - other.per_row)  # (R,)
    return float(ahead.mean()), half_interval(ahead, one.quality.metric)


# `stepdial evaluate BUNDLE`: quality of every rung, again, in the runtime, beside its manifest.
# Takes the data set that the bundle was trained for from its provenance; the path must be given.


def measure_bundle(
    bundle: Bundle,
    steps: list[int] | None,
    data: str,
    samples: int | None,
    columns: Columns = AS_TRAINED,
) -> dict[int, Measured]:
    """What is measured of each rung, by its steps; only of rungs that the bundle has."""
    manifest = bundle.manifest
    counts = steps or list(manifest.steps)
    for count in counts:
        manifest.rung(count)
    dataset = dataset_of(bundle, data, columns)
    model = open_model(bundle)
    batches = partial(held_out_batches, dataset, manifest, samples)
    if one_way(manifest):
        return {
            count: one.measured() for count, one in on_the_way(model, counts, batches()).items()
        }
    return {count: measure_rung(model, count, batches()) for count in counts}


def dataset_of(bundle: Bundle, data: str, columns: Columns = AS_TRAINED) -> Dataset:
    """The data that a bundle's model was trained for, read from there."""
    manifest = bundle.manifest
    try:
        # Provenance is free: what is no recipe is caught below.
        kept = dict(manifest.provenance["recipe"])  # type: ignore[call-overload]  # JSON
        read = {**kept["data"], "path": ""}
        if isinstance(manifest.input, ImageInput):  # else those of the images given are measured
            read |= {"mean": manifest.input.mean, "std": manifest.input.std}
        recipe = recipe_from({**kept, "data": read}, "provenance.recipe")
    except (KeyError, TypeError, RecipeError) as error:
        raise BundleError(
            f"does not say how to read its data ({error}); evaluate the run it was exported from",
            field="provenance",
            file=str(bundle.folder),
        ) from None
    tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path)) if manifest.tokenizer else None
    facts = {
        "labels": None if manifest.labels is None else list(manifest.labels),
        "data_sha256": manifest.provenance.get("data_sha256"),
    }
    return open_measured(data_at(recipe, data, columns), tokenizer, facts)


def print_beside_manifest(bundle: Bundle, rows: dict[int, Measured]) -> None:
    metric = bundle.manifest.rungs[0].quality.metric
    print(f"{bundle.manifest.name}, {bundle.manifest.method}, in the serving runtime")
    print(f"{'steps':>5} {metric:>9}  {'95 % interval':<18} {'samples':>8} {'manifest':>9}")
    for steps, (q, _, _) in rows.items():
        known = bundle.manifest.rung(steps).quality.value
        interval = f"{q.low:.4f} to {q.high:.4f}"
        whole = "" if q.exact is None else f"  {100 * q.exact:.2f} % of rows right as a whole"
        print(f"{steps:>5} {q.value:>9.4f}  {interval:<18} {q.samples:>8} {known:>9.4f}{whole}")
    f1s = [f"{one.macro_f1:.4f}" for one in rows.values() if one.macro_f1 is not None]
    if f1s:
        print(f"macro F1: {' / '.join(f1s)}")
    ladder = [bundle.manifest.rung(steps) for steps in sorted(rows)]
    measured = dataclasses.replace(
        bundle.manifest,
        rungs=tuple(ladder),
        full_steps=ladder[-1].steps,
        default_steps=choose_default(rows),
        range=range_of(rows),
        calibration=None,
    )
    for said in (range_in_words(measured), flat_in_words(measured)):
        if said is not None:
            print(said)


# A precision compared with float32: the share of answers that agree, and the change of quality.


def compare(
    opened: Model, reference: Model, steps: int, batches: Iterable[Batch]
) -> tuple[Measured, AgainstFp32]:
    """The quality of a rung, and how it differs from the other's on the same rows."""
    found = Found(opened.bundle.manifest.labelled)
    for batch in batches:
        found.add(batch, *(logits_of(one, steps, batch) for one in (opened, reference)))
    return found.measured(), found.against()


# With the dial of time, fewer steps are the beginning of more: what is read out after k steps is
# the answer of the rung of k steps. So one pass with the most steps measures every rung.


def one_way(manifest: Manifest) -> bool:
    """Whether one pass gives the answers of every rung."""
    stepped = manifest.labelled and manifest.step is not None
    return stepped and manifest.dial == "time" and manifest.method == "euler"


def on_the_way(
    opened: Model, counts: Sequence[int], batches: Iterable[Batch], reference: Model | None = None
) -> dict[int, "Found"]:
    """What one pass with the most of these steps finds at each of them, beside a reference."""
    found = {count: Found(opened.bundle.manifest.labelled) for count in counts}
    models = [opened] if reference is None else [opened, reference]
    for batch in batches:
        rows = np.ascontiguousarray(np.asarray(batch.inputs[0]))
        passed = [one.step_classifier(max(counts)).jumps(rows) for one in models]  # (M, B, ..., C)
        for count, one in found.items():
            one.add(batch, *(logits[count - 1] for logits in passed))
    return found


class Found:
    """How right the answers of a rung are so far, and how often a reference gives the same."""

    def __init__(self, labelled: bool) -> None:
        self._labelled = labelled
        self._tally, self._reference = Sums(), Sums()
        self._same = self._counted = 0

    def add(self, batch: Batch, logits: FloatArray, reference: FloatArray | None = None) -> None:
        add_answers(self._tally, batch, logits)
        if reference is None:
            return
        add_answers(self._reference, batch, reference)
        kept = np.asarray(batch.targets) != IGNORED
        self._same += int((logits.argmax(-1) == reference.argmax(-1))[kept].sum())
        self._counted += int(kept.sum())

    def measured(self) -> Measured:
        return measured_by(self._tally, self._labelled)

    def against(self) -> AgainstFp32:
        """How the rung differs from the reference."""
        change = self.measured().quality.value - self._reference.quality(self._labelled).value
        return AgainstFp32(self._same / self._counted, change, self._counted)
