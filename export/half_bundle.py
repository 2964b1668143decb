"""A 16-bit bundle of a float32 bundle, without the run that it was made of.

Its graphs get the matrices and caches that an export of the run with `--precision` would give them.
What the model computes in float64 is not known here, so answers are held against the float32
bundle, on the rows that quality is measured on.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx
import torch

from export.draft import UNCOMPARED, UNMEASURED, model_card
from export.early import REFUSED
from export.graph import keep_shapes
from export.half import OWN_WEIGHTS, Half, Products, chooses, half_caches, use_half
from export.pieces import WeightsFile
from export.quality import Measured, choose_default, compare, logits_of, named_rungs, range_of
from export.run import CARD, check_target, sealed_trial
from export.verify import Expected, VerificationError, verify_rung
from serve.bundle import (
    Bundle,
    Manifest,
    Rung,
    Verified,
    open_staging,
    seal_bundle,
    steps_in_words,
)
from serve.runtime import OpenedModel, open_model
from train.data.batch import Batch

Batches = Callable[[], Iterable[Batch]]


def halve_bundle(
    bundle: Bundle, target: Path, half: Half, batches: Batches, say: Callable[[str], None] = print
) -> Bundle:
    """The bundle with 16-bit weights and caches, each rung measured on these rows."""
    manifest = bundle.manifest
    check_target(target)
    if manifest.rounds:
        raise ValueError(
            f"{manifest.name} is {manifest.precision_in_words} already: name a bundle of fp32, or "
            "the run that it was made of"
        )
    if manifest.step is not None:
        step = onnx.load(str(bundle.folder / manifest.step.step), load_external_data=False)
        if chooses(step):
            raise ValueError(OWN_WEIGHTS.format(manifest.name, half))
    rungs = tuple(
        dataclasses.replace(rung, verified=UNMEASURED, against_fp32=UNCOMPARED)
        for rung in manifest.rungs
    )
    draft = dataclasses.replace(
        manifest,
        precision=half,
        cache="kv_fp16" if manifest.keeps_caches else manifest.cache,
        rungs=rungs,
        calibration=None,  # thresholds of float32 hold for float32 only
        files={},
    )
    if manifest.calibration is not None:
        say(
            f"{REFUSED}: it was measured in float32 only; export the run, not the bundle, with "
            f"--precision {half}"
        )
    with open_staging(target) as staging:
        _write_graphs(bundle, draft, half, staging)
        with sealed_trial(draft, staging, target) as opened:
            say("measuring quality on held-out rows, beside float32")
            tried = _tried(opened, open_model(bundle), batches, say)
        (staging / CARD).write_text(model_card(tried), encoding="utf-8")
        return seal_bundle(staging, tried, target)


def _write_graphs(bundle: Bundle, draft: Manifest, half: Half, staging: Path) -> None:
    step = {} if draft.step is None else draft.step.graphs
    weights = WeightsFile(draft.weights)
    named = {*step.values(), *(graph for rung in draft.rungs for graph in rung.graphs.values())}
    for path in (bundle.folder / graph for graph in sorted(named)):
        model = onnx.load(str(path))
        if draft.cache == "kv_fp16" and path.name == step.get("step"):
            half_caches(model.graph)
        each: Products = "own" if path.name in step.values() else "shared"
        use_half(model, half, each if step else "float")
        weights.externalise(model)
        if path.name not in step.values():
            del model.graph.value_info[:]
            keep_shapes(model)
        (staging / path.name).write_bytes(model.SerializeToString(deterministic=True))
    weights.write(staging)
    for graph in sorted(named):
        onnx.checker.check_model(str(staging / graph))
    spec = draft.tokenizer
    for file in () if spec is None else (spec.file, spec.chat_template):
        if file is not None:
            shutil.copyfile(bundle.folder / file, staging / file)


def _tried(
    opened: OpenedModel, reference: OpenedModel, batches: Batches, say: Callable[[str], None]
) -> Manifest:
    """The manifest with every rung measured beside the float32 bundle's."""
    draft = opened.bundle.manifest
    measured: dict[int, Measured] = {}
    rungs: list[Rung] = []
    for rung in draft.rungs:
        measured[rung.steps], against = compare(opened, reference, rung.steps, batches())
        verified = _verified(opened, reference, rung, next(iter(batches())))
        quality = measured[rung.steps].quality
        say(
            f"{steps_in_words(rung.steps):>9}: {quality.metric} {quality.value:.4f}, "
            f"{against.change:+.4f} beside float32, {100 * against.top1_agreement:.2f} % answers "
            "as in float32"
        )
        rungs.append(
            dataclasses.replace(rung, quality=quality, verified=verified, against_fp32=against)
        )
    return dataclasses.replace(
        draft,
        rungs=named_rungs(tuple(rungs), measured),
        default_steps=choose_default(measured),
        range=range_of(measured),
        files={},
    )


def _verified(opened: OpenedModel, reference: OpenedModel, rung: Rung, batch: Batch) -> Verified:
    """How far answers are from the float32 bundle's, and those were from float64."""
    known = reference.bundle.manifest.rung(rung.steps).verified
    expected = _expected(reference, rung.steps, batch, known.float32_error)
    found = verify_rung(opened, rung, [expected])
    error = found.max_abs_error + known.max_abs_error
    if not error <= found.tolerance:
        raise VerificationError(
            f"the graph of {steps_in_words(rung.steps)} is off by {error:.3g}, above its tolerance "
            f"{found.tolerance:.3g}. No bundle was kept."
        )
    return dataclasses.replace(found, max_abs_error=error)


def _expected(reference: OpenedModel, steps: int, batch: Batch, float32_error: float) -> Expected:
    """What the float32 bundle answers."""
    inputs = tuple(torch.as_tensor(each) for each in batch.inputs)
    logits = logits_of(reference, steps, batch).astype(np.float64)
    expected = Expected(inputs, logits, float32_error)
    if reference.bundle.manifest.embedding is None:
        return expected
    pooled = reference.classifier(steps).embed(inputs[0].numpy()).astype(np.float64)
    return dataclasses.replace(expected, embedding=Expected(inputs, pooled, float32_error))
