"""From a run to a bundle: trace, stitch, verify, calibrate, seal. A failed check keeps no bundle.

Puts the other modules in order; how each does its part is theirs.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from export.calibrate import (
    choose_default,
    held_out_batches,
    measure_latency,
    measure_rung,
    name_efforts,
)
from export.card import model_card
from export.parts import Parts, trace
from export.stitch import stitch
from export.verify import Sampler, edge_samples, verify_classifier, verify_decoder
from export.weights import WeightsFile
from serve.bundle import (
    Bundle,
    InputSpec,
    Manifest,
    Quality,
    Rung,
    Shape,
    TokenizerSpec,
    Truncation,
    Verified,
    open_staging,
    read_bundle,
    seal_bundle,
    write_latency,
)
from serve.runtime import Model, open_model
from serve.runtime.ort_session import usable_cores
from serve.runtime.protocol import IntArray
from train.checkpoint import load_run
from train.config import Recipe
from train.data import Dataset, open_dataset
from train.model import OTTransformer, count_parameters
from train.ode import method_named

WEIGHTS, TOKENIZER, CARD = "weights.bin", "tokenizer.json", "README.md"
UNMEASURED = Verified(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRequest:
    """What `stepdial export` was asked for."""

    run: Path
    target: Path
    steps: tuple[int, ...]
    method: str | None = None
    name: str | None = None
    data: str = ""
    samples: int | None = None  # held-out rows to calibrate on; None: all of them
    card: dict[str, Any] = dataclasses.field(default_factory=dict)


def export_run(request: ExportRequest, say: Callable[[str], None] = print) -> Bundle:
    """Export a run; the sealed bundle. Raises before anything appears at the target."""
    model, recipe, tokenizer, facts = load_run(request.run)
    if request.data:
        data = dataclasses.replace(recipe.data, path=request.data)
        recipe = dataclasses.replace(recipe, data=data)
    method = request.method or recipe.steps.method
    method_named(method)
    ladder = (1,) if model.discrete else request.steps
    if model.discrete and request.steps not in ((), (1,)):
        say("a discrete model has one depth: its bundle has the one rung of 1 step")
    draft = _draft(request, recipe, model, facts, method, ladder)
    _check_target(request.target)
    dataset = open_dataset(recipe, tokenizer)
    with open_staging(request.target) as staging:
        say(f"tracing one evaluation of {recipe.name}")
        parts = trace(model)
        (staging / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
        _write_graphs(staging, parts, model, method, ladder)
        with open_staging(request.target.with_name(f"{request.target.name}.trial")) as trial:
            rungs = _measure(draft, staging, trial, model, dataset, request.samples, say)
        default = choose_default({rung.steps: rung.quality for rung in rungs})
        manifest = dataclasses.replace(draft, rungs=rungs, default_steps=default)
        (staging / CARD).write_text(model_card(manifest), encoding="utf-8")
        bundle = seal_bundle(staging, manifest, request.target)
    say(f"measuring latency on this machine ({usable_cores()} cores)")
    calibrate_latency(bundle.folder)
    return read_bundle(bundle.folder)


def _check_target(target: Path) -> None:
    """Before the work, not after it: whether a bundle can be sealed there."""
    if not target.exists() or (target / "manifest.json").is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ValueError(
            f"{target} exists and is no bundle, so it is not replaced: remove it or choose another "
            "--out"
        )


def calibrate_latency(folder: Path, threads: int | None = None) -> None:
    """Measure a bundle's latency here and write its latency.json."""
    bundle = read_bundle(folder)
    model = open_model(bundle, threads)
    write_latency(bundle.folder, measure_latency(model, threads or usable_cores()))


def _write_graphs(
    staging: Path, parts: Parts, model: OTTransformer, method: str, ladder: tuple[int, ...]
) -> None:
    weights = WeightsFile(WEIGHTS)
    for steps in ladder:
        graph = stitch(parts, method, steps, model.T, model.discrete)
        weights.externalise(graph)
        (staging / _graph_name(steps)).write_bytes(graph.SerializeToString(deterministic=True))
    weights.write(staging)


def _graph_name(steps: int) -> str:
    return f"steps-{steps}.onnx"


def _draft(
    request: ExportRequest,
    recipe: Recipe,
    model: OTTransformer,
    facts: dict[str, Any],
    method: str,
    ladder: tuple[int, ...],
) -> Manifest:
    """The manifest with quality and verification still open."""
    labels = facts.get("labels")
    efforts = name_efforts(list(ladder))
    unknown = Quality("accuracy" if labels else "loss", 0.0, 0.0, 0.0, 1)
    spent = method_named(method).evaluations
    rungs = tuple(
        # method_named has checked the name; the manifest checks it again.
        Rung(m, method, m * spent, efforts.get(m), _graph_name(m), unknown, UNMEASURED)  # type: ignore[arg-type]
        for m in ladder
    )
    head, tail = recipe.data.head, recipe.data.tail
    cut = Truncation(head, tail) if head + tail else Truncation(recipe.model.window, 0)
    kept = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=""))
    return Manifest(
        name=request.name or recipe.name,
        task="classify" if labels else "generate",
        method=method,  # type: ignore[arg-type]
        T=model.T,
        full_steps=ladder[-1],
        default_steps=ladder[-1],
        input=InputSpec("text", recipe.model.window, cut if labels else None),
        labels=tuple(labels) if labels else None,
        tokenizer=TokenizerSpec(
            recipe.data.tokenizer if not labels else "bpe",
            TOKENIZER,
            0,
            facts["vocabulary"],
        ),
        shape=Shape(
            recipe.model.layers,
            recipe.model.heads,
            recipe.model.width // recipe.model.heads,
            recipe.model.width,
            count_parameters(model),
        ),
        weights=WEIGHTS,
        rungs=rungs,
        card={"title": recipe.title, **recipe.card, **request.card},
        provenance={
            "recipe": kept.to_json(),
            "iteration": facts["iteration"],
            "torch": torch.__version__,
        },
    )


def _measure(
    draft: Manifest,
    staging: Path,
    trial: Path,
    model: OTTransformer,
    dataset: Dataset,
    samples: int | None,
    say: Callable[[str], None],
) -> tuple[Rung, ...]:
    """Verify and calibrate every rung in the serving runtime, through a bundle that nobody sees."""
    for path in staging.iterdir():
        os.link(path, trial / path.name)
    target = trial.with_name(f"{trial.name}-sealed")
    try:
        opened = open_model(seal_bundle(trial, draft, target))
        return tuple(_measured(rung, opened, model, dataset, samples, say) for rung in draft.rungs)
    finally:
        _remove(target)


def _measured(
    rung: Rung,
    opened: Model,
    model: OTTransformer,
    dataset: Dataset,
    samples: int | None,
    say: Callable[[str], None],
) -> Rung:
    window = opened.bundle.manifest.input.max_tokens
    shapes = edge_samples(_sampler(dataset), window)
    batches = held_out_batches(dataset, window, samples)
    if dataset.labels is None:
        decoder = opened.decoder(rung.steps)
        verified = verify_decoder(model, decoder, rung.method, rung.steps, shapes)
        quality = measure_rung(decoder, batches, labelled=False)
    else:
        classifier = opened.classifier(rung.steps)
        verified = verify_classifier(model, classifier, rung.method, rung.steps, shapes)
        quality = measure_rung(classifier, batches, labelled=True)
    say(
        f"{rung.steps:>3} steps: verified within {verified.max_abs_error:.1e} "
        f"(tolerance {verified.tolerance:.1e}), {quality.metric} {quality.value:.4f} "
        f"[{quality.low:.4f}, {quality.high:.4f}] on {quality.samples}"
    )
    return dataclasses.replace(rung, verified=verified, quality=quality)


def _sampler(dataset: Dataset) -> Sampler:
    """Real held-out tokens in any shape: rows joined end to end."""
    stream: list[int] = []
    for batch in dataset.held_out(8):
        stream += batch.tokens[batch.tokens != 0].tolist()
        if len(stream) > 20_000:
            break

    def sample(rows: int, length: int) -> IntArray:
        wanted = rows * length
        repeated = stream * (wanted // len(stream) + 1)
        return torch.tensor(repeated[:wanted]).view(rows, length).numpy()

    return sample


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
