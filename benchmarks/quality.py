"""Quality at each rung, beside a plain transformer, a bag of words and the original.

    python -m benchmarks.quality [--bundles FOLDER ...]

Measures nothing itself: the ladder is what each bundle's manifest holds, measured by the exporter
in the runtime that serves; the rest is what baselines.py kept. `stepdial evaluate BUNDLE` measures
a ladder again.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.lab import (
    BASELINES,
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Target,
    options,
    parser,
    run,
)
from serve.bundle import Bundle, Quality

NAME = "quality"
OTHERS = {
    "discrete": "discrete transformer",
    "original": "all layers of the original",
    "bag_of_words": "bag of words",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model of the zoo should reach; `within` is how far a rung may be from the largest."""

    best: float
    within: Mapping[int, float]
    samples: int = 0  # of the whole official test set
    beside_discrete: float | None = None
    converted: bool = False
    gain: float = 0.0  # of the best rung over the first


WANTED = {
    "shakespeare": Wanted(1.52, {1: 0.05, 2: 0.03, 4: 0.02}, beside_discrete=0.03),
    "sentiment": Wanted(0.905, {}, samples=25_000, converted=True, gain=0.008),
    "topics": Wanted(0.92, {}, samples=7_600, converted=True),
}


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    kept: dict[str, Any] = {}
    if BASELINES.is_file():
        kept = json.loads(BASELINES.read_text(encoding="utf-8"))
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for bundle in chosen.read():
        name = bundle.manifest.name
        beside = {kind: kept.get(name, {}).get(kind) for kind in OTHERS}
        rows += [
            [name, f"steps {rung.steps}", *_cells(rung.quality)] for rung in bundle.manifest.rungs
        ]
        rows += [
            [name, OTHERS[kind], *_cells(_baseline(found))]
            for kind, found in beside.items()
            if found
        ]
        if name in WANTED:
            targets += _targets(bundle, WANTED[name], beside)
    columns = ("model", "what", "metric", "value", "low", "high", "samples")
    caption = (
        "On held-out data, with 95 % intervals. loss: nats a token, lower is better; accuracy: "
        "the share that is right."
    )
    return provenance.result(
        NAME,
        "Quality at each rung",
        "As the exporter measured it in the runtime that serves, beside a discrete transformer "
        "of equal size, a logistic regression on bags of words and, of a converted model, all "
        "layers of its original, fine-tuned.",
        [Table(caption, columns, rows), _costs(kept)],
        targets,
    )


def _costs(kept: Mapping[str, Any]) -> Table:
    """What the models of the zoo and the discrete ones cost to train."""
    kinds = {"any_step": "any step", "discrete": "discrete", "original": OTHERS["original"]}
    columns = ("model", "kind", "parameters", "iterations", "evaluations", "CPU seconds")
    rows: list[Sequence[Cell]] = []
    for name in WANTED:
        for kind, shown in kinds.items():
            found = kept.get(name, {}).get(kind)
            if found and "evaluations" in found:
                keys = ("parameters", "iterations", "evaluations", "cpu_s")
                rows.append([name, shown, *(found[key] for key in keys)])
    caption = (
        "What training cost, on one thread (sentiment: two), without the teacher's answers: an "
        "evaluation is one pass of a batch through the velocity, forward and back; one of all "
        "layers of the original is three of two. CPU seconds are of several processors, some of "
        "them busy with other work, and those of `sentiment` lack 272 iterations before an "
        "interruption (about 11,700 in all): compare evaluations."
    )
    return Table(caption, columns, rows)


def _baseline(found: Mapping[str, Any]) -> Quality:
    """Of a model without a dial; one that is listed by steps has the same at all of them."""
    if "rungs" in found:
        found = next(iter(found["rungs"].values()))
    keys = ("metric", "value", "low", "high", "samples")
    return Quality(**{key: found[key] for key in keys})


def _cells(quality: Quality) -> list[Cell]:
    shown = [f"{value:.4f}" for value in (quality.value, quality.low, quality.high)]
    return [quality.metric, *shown, quality.samples]


def _targets(bundle: Bundle, wanted: Wanted, beside: Mapping[str, Any]) -> list[Target]:
    discrete = beside["discrete"]
    name, full = bundle.manifest.name, bundle.manifest.rungs[-1].quality
    lower_is_better = full.metric == "loss"
    sign = 1 if lower_is_better else -1
    if lower_is_better:
        best = min(rung.quality.value for rung in bundle.manifest.rungs)
        targets = [Target(f"{name}: loss at its best rung", best, "<=", wanted.best, "nats")]
    else:
        targets = [Target(f"{name}: accuracy at full steps", full.value, ">=", wanted.best)]
    for steps, within in wanted.within.items():
        if steps in bundle.manifest.steps:
            worse = sign * (bundle.manifest.rung(steps).quality.value - full.value)
            what = f"{name}: worse at {steps} than at {bundle.manifest.full_steps} steps by"
            targets.append(Target(what, worse, "<=", within))
    if wanted.samples:
        targets.append(Target(f"{name}: texts tested", full.samples, "==", wanted.samples))
    if wanted.beside_discrete is not None and discrete is not None:
        above = targets[0].value - _baseline(discrete).value
        what = f"{name}: above the discrete transformer by"
        targets.append(Target(what, above, "<=", wanted.beside_discrete, "nats"))
    if wanted.converted:
        targets += _converted(bundle, wanted, beside)
    return targets


def _converted(bundle: Bundle, wanted: Wanted, beside: Mapping[str, Any]) -> list[Target]:
    """The first rung beside as many layers alone, the last beside all of the original."""
    name, rungs = bundle.manifest.name, bundle.manifest.rungs
    first, full = rungs[0].quality, rungs[-1].quality
    targets: list[Target] = []
    if wanted.gain:
        gain = max(rung.quality.value for rung in rungs) - first.value
        targets.append(Target(f"{name}: gain of the best rung", gain, ">=", wanted.gain))
    if beside["discrete"]:
        above = first.value - _baseline(beside["discrete"]).value
        targets.append(Target(f"{name}: one step above two layers alone by", above, ">=", 0.0))
    if beside["original"]:
        below = _baseline(beside["original"]).value - full.value
        what = f"{name}: full steps below all layers of the original by"
        targets.append(Target(what, below, "<=", 0.015))
    return targets


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
