"""Evaluations that max_disagreement saves, and how often answers differ, on official test sets.

    python -m benchmarks.early_answers --data digits=PATH sentiment=PATH topics=PATH

Every row, none of which calibration saw, is answered early at each certified level and at full
steps, in the runtime that serves.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.lab import (
    ZOO,
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
from export.quality import dataset_of, held_out_batches
from serve.bundle import Bundle, Level
from serve.runtime import StepClassifier, open_model

NAME = "early_answers"
AIM = 0.01  # the level whose savings are promised
SAVED = 3.0  # times fewer evaluations than full steps
QUICK_ROWS = 256


class Answers(NamedTuple):
    """Labels of all rows, and what they cost."""

    labels: np.ndarray[tuple[int], np.dtype[np.int64]]  # (R,)
    evaluations: float  # a row


@dataclass(frozen=True, slots=True)
class Tested:
    """A level on a test set."""

    level: Level
    disagreement: float
    evaluations: float
    accuracy: float


def main(arguments: Sequence[str]) -> int:
    read = parser(__doc__.partition("\n")[0])
    read.add_argument("--data", nargs="+", required=True, metavar="NAME=PATH")
    parsed = read.parse_args(arguments)
    paths = dict(pair.split("=", 1) for pair in parsed.data)
    parsed.bundles = parsed.bundles or [ZOO / name for name in paths]
    return run(NAME, arguments, parsed, partial(measure, options(parsed), paths))


def measure(chosen: Options, paths: dict[str, str], provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for bundle in chosen.read():
        name = bundle.manifest.name
        if name not in paths:
            raise SystemExit(f"--data names no test set of {name}")
        if bundle.manifest.calibration is None:
            raise ValueError(f"{name} was not calibrated for early answers: leave it out")
        full = bundle.manifest.full_steps
        for one in tested(bundle, paths[name], QUICK_ROWS if chosen.quick else None):
            allowed, saved = one.level.max_disagreement, full / one.evaluations
            rows.append(
                [
                    name,
                    f"{100 * allowed:g} %",
                    f"{100 * one.disagreement:.2f} %",
                    f"{one.evaluations:.2f} of {full}",
                    f"{saved:.2f}",
                    f"{100 * one.accuracy:.2f} %",
                ]
            )
            if allowed == AIM:
                targets.append(Target(f"{name}: disagreement", one.disagreement, "<=", AIM))
                targets.append(Target(f"{name}: evaluations saved", saved, ">=", SAVED, "times"))
    columns = ("model", "allowed", "differ from full", "evaluations", "times fewer", "accuracy")
    return provenance.result(
        NAME,
        "Early answers",
        "Each row stops at the first evaluation where its answer is ahead by the certified "
        "threshold; all rows of the official test set, of which calibration saw none.",
        [Table("By max_disagreement.", columns, rows)],
        targets,
    )


def tested(bundle: Bundle, data: str, most_rows: int | None) -> list[Tested]:
    """Every certified level on the test set."""
    manifest = bundle.manifest
    assert manifest.calibration is not None
    dataset = dataset_of(bundle, data)
    batches = [
        (batch.inputs[0].contiguous().numpy(), batch.targets.numpy())
        for batch in held_out_batches(dataset, manifest, most_rows)
    ]
    truth = np.concatenate([targets for _, targets in batches])
    classifier = open_model(bundle).step_classifier(manifest.full_steps)
    inputs = [rows for rows, _ in batches]
    whole = _answers(classifier, inputs, np.inf)
    found = []
    for level in manifest.calibration.levels:
        if level.threshold is None:
            continue
        early = _answers(classifier, inputs, level.threshold)
        differing = float((early.labels != whole.labels).mean())
        right = float((early.labels == truth).mean())
        found.append(Tested(level, differing, early.evaluations, right))
    return found


def _answers(classifier: StepClassifier, inputs: Sequence[np.ndarray], threshold: float) -> Answers:
    labels, evaluations = [], []
    for rows in inputs:
        early = classifier.early(rows, threshold)
        labels.append(early.logits.argmax(-1))
        evaluations.append(early.evaluations)
    return Answers(np.concatenate(labels), float(np.concatenate(evaluations).mean()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
