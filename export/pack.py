"""From a run to a bundle: trace, stitch, verify, calibrate, seal. A failed check keeps no bundle.

Puts the other modules in order; how each does its part is theirs.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from export.calibrate import Measured, choose_default, held_out_batches, measure_rung
from export.card import model_card
from export.draft import TOKENIZER, WEIGHTS, draft_manifest, encoder_name, graph_name
from export.latency import measure_latency
from export.parts import Traced, trace
from export.samples import Inputs, samples_of
from export.stitch import stitch
from export.verify import verify_rung
from export.weights import WeightsFile
from serve.bundle import (
    Bundle,
    Manifest,
    Rung,
    Verified,
    open_staging,
    read_bundle,
    seal_bundle,
    write_latency,
)
from serve.runtime import Model, open_model
from serve.runtime.ort_session import usable_cores
from train.batch import Dataset
from train.checkpoint import load_run
from train.config import Recipe
from train.data import check_same_meaning, open_dataset
from train.model import Stepped
from train.ode import method_named
from train.schedule import ladder_of

CARD = "README.md"
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a bundle shall be."""

    target: Path
    steps: tuple[int, ...] = ()  # (): 1, 2, 4, ... and the full count of its training
    method: str | None = None  # None: as trained
    name: str | None = None
    samples: int | None = None  # held-out rows to calibrate on; None: all of them
    card: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What is exported: a model, and the recipe and data that it was trained with."""

    model: Stepped
    recipe: Recipe
    dataset: Dataset
    iteration: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Ladder:
    steps: tuple[int, ...]
    method: str


def export_run(run: Path, request: ExportRequest, data: str = "", say: Say = print) -> Bundle:
    """Export a run, whose data is now at `data` if that is given; the sealed bundle."""
    model, recipe, tokenizer, facts = load_run(run)
    if data:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=data))
    _ladder(model, recipe, request)
    _check_target(request.target)
    dataset = open_dataset(recipe, tokenizer)
    check_same_meaning(dataset, recipe, facts)
    if dataset.digest != facts["data_sha256"]:
        say("not the data it was trained on: quality is measured on the held-out part of this one")
    return export_model(Origin(model, recipe, dataset, facts["iteration"]), request, say)


def export_model(origin: Origin, request: ExportRequest, say: Say = print) -> Bundle:
    """Export a model; the sealed bundle. Raises before anything appears at the target."""
    model, recipe, dataset = origin.model.eval(), origin.recipe, origin.dataset
    ladder = _ladder(model, recipe, request)
    if model.discrete and (
        request.steps not in ((), (1,)) or request.method not in (None, "euler")
    ):
        say("the weights of this model differ by depth: its bundle has the one rung of 1 step")
    _check_target(request.target)
    samples = samples_of(dataset, recipe.model.window, recipe.model.target_window)
    with open_staging(request.target) as staging:
        say(f"tracing one evaluation of {recipe.name}")
        traced = trace(model, samples.draw(2, 3), samples.draw(3, 5))
        draft = draft_manifest(
            request.name or recipe.name,
            recipe,
            model,
            traced,
            dataset,
            ladder.steps,
            ladder.method,
            {"title": recipe.title, **recipe.card, **request.card},
            origin.iteration,
        )
        if dataset.tokenizer is not None:
            (staging / TOKENIZER).write_text(dataset.tokenizer.to_str(), encoding="utf-8")
        _write_graphs(staging, traced, ladder)
        with open_staging(request.target.with_name(f"{request.target.name}.trial")) as trial:
            trying = _Trial(draft, staging, trial, origin, samples.edges(), request.samples, say)
            rungs, default = _tried(trying)
        manifest = dataclasses.replace(draft, rungs=rungs, default_steps=default)
        (staging / CARD).write_text(model_card(manifest), encoding="utf-8")
        bundle = seal_bundle(staging, manifest, request.target)
    say(f"measuring latency on this machine ({usable_cores()} cores)")
    calibrate_latency(bundle.folder)
    return read_bundle(bundle.folder)


def calibrate_latency(folder: Path, threads: int | None = None) -> None:
    """Measure a bundle's latency here and write its latency.json."""
    bundle = read_bundle(folder)
    model = open_model(bundle, threads)
    write_latency(bundle.folder, measure_latency(model, threads or usable_cores()))


def _ladder(model: Stepped, recipe: Recipe, request: ExportRequest) -> _Ladder:
    method = request.method or recipe.steps.method
    method_named(method)
    if model.discrete:
        return _Ladder((1,), "euler")
    return _Ladder(request.steps or tuple(ladder_of(recipe)), method)


def _check_target(target: Path) -> None:
    """Before the work, not after it: whether a bundle can be sealed there."""
    if not target.exists() or (target / "manifest.json").is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ValueError(
            f"{target} exists and is no bundle, so it is not replaced: remove it or choose another "
            "--out"
        )


def _write_graphs(staging: Path, traced: Traced, ladder: _Ladder) -> None:
    weights = WeightsFile(WEIGHTS)
    for steps in ladder.steps:
        graphs = {graph_name(steps): traced.graph}
        if traced.encoder is not None:
            graphs[encoder_name(steps)] = traced.encoder
        for name, parts in graphs.items():
            graph = stitch(parts, ladder.method, steps)
            weights.externalise(graph)
            (staging / name).write_bytes(graph.SerializeToString(deterministic=True))
    weights.write(staging)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """What is needed to try a bundle that nobody sees."""

    draft: Manifest
    staging: Path
    folder: Path
    origin: Origin
    edges: list[Inputs]
    samples: int | None
    say: Say


def _tried(trial: _Trial) -> tuple[tuple[Rung, ...], int]:
    """Every rung, verified and calibrated in the serving runtime, and the default one."""
    for path in trial.staging.iterdir():
        os.link(path, trial.folder / path.name)
    target = trial.folder.with_name(f"{trial.folder.name}-sealed")
    try:
        opened = open_model(seal_bundle(trial.folder, trial.draft, target))
        measured: dict[int, Measured] = {}
        rungs: list[Rung] = []
        for rung in trial.draft.rungs:
            verified = verify_rung(trial.origin.model, opened, rung, trial.edges)
            measured[rung.steps] = one = _measured(trial, opened, rung)
            rungs.append(dataclasses.replace(rung, verified=verified, quality=one.quality))
            _report(rungs[-1], verified, trial.say)
        return tuple(rungs), choose_default(measured)
    finally:
        _remove(target)


def _measured(trial: _Trial, opened: Model, rung: Rung) -> Measured:
    batches = held_out_batches(trial.origin.dataset, trial.draft, trial.samples)
    return measure_rung(opened, rung.steps, batches)


def _report(rung: Rung, verified: Verified, say: Say) -> None:
    q = rung.quality
    say(
        f"{rung.steps:>3} steps: verified within {verified.max_abs_error:.1e} "
        f"(tolerance {verified.tolerance:.1e}), {q.metric} {q.value:.4f} "
        f"[{q.low:.4f}, {q.high:.4f}] on {q.samples}"
    )


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
