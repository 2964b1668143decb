"""What more steps buy: quality at each rung beside plain models of one and of several blocks.

    python -m benchmarks.dial_range --runs RUNS --task logic --steps 1,2,4,8,16

RUNS holds a run of each seed, TASK-s0, TASK-s1, ..., and of plain models of one block and more,
TASK-plain1-s0, TASK-plain4-s0, ...; what is not there is left out, and said. All are measured on
the held-out data of the task. Intervals are of paired rows: the same puzzle at two step counts.
"""

import hashlib
import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.lab import Cell, Provenance, Result, Table, parser, run
from train.checkpoint import load_run
from train.data import open_dataset
from train.evaluate import rows_at_once
from train.metrics import METRICS, read_metrics
from train.quality import Tally
from train.recipe import data_at
from train.schedule import steps_of
from train.tally import Gain, PerRow, Quality, gain

NAME = "dial_range"
GATE = {"accuracy": 0.03, "loss": 0.05}  # what depth must be worth before a dial can have range


@dataclass(frozen=True, slots=True)
class Measured:
    """One run at each of its counts."""

    name: str
    seed: int
    parameters: int
    full: int  # the most steps it was trained for
    trained: int  # evaluations that its training went through
    cpu_s: float
    qualities: Mapping[int, Quality]
    per_row: Mapping[int, PerRow]  # (rows,): what each adds to the quality, whose mean it is
    rows: str  # a name for the held-out rows: which runs were measured on the same ones

    @property
    def value(self) -> float:
        """Of a plain model: its one quality."""
        return next(iter(self.qualities.values())).value


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--runs", type=Path, required=True, metavar="FOLDER")
    made.add_argument("--task", required=True, help="what the names of the runs begin with")
    made.add_argument("--steps", default="1,2,4,8,16", help="step counts (default 1,2,4,8,16)")
    made.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    parsed = made.parse_args(arguments)
    counts = sorted(int(count) for count in parsed.steps.split(","))

    def measure(provenance: Provenance) -> Result:
        dials, plain = runs_of(parsed.runs, parsed.task)
        if not dials:
            raise ValueError(f"{parsed.runs} has no run {parsed.task}-s0: train it first")
        found = [measured(folder, counts, parsed.data) for folder in dials]
        beside = {
            blocks: [measured(folder, [1], parsed.data) for folder in folders]
            for blocks, folders in plain.items()
        }
        return provenance.result(
            f"{NAME}_{parsed.task}",
            f"The range of the dial: {parsed.task}",
            f"{len(found)} seeds, held-out data; plain models: "
            + (", ".join(f"{k} blocks ({len(v)})" for k, v in beside.items()) or "none"),
            [
                ladder_table(found, beside),
                Table("What it buys", ("what", "found"), says(found, beside)),
            ],
            [],
        )

    return run(NAME, arguments, parsed, measure)


def runs_of(folder: Path, task: str) -> tuple[list[Path], dict[int, list[Path]]]:
    """The finished runs of the dial, and those of plain models by their blocks."""
    dials: list[Path] = []
    plain: dict[int, list[Path]] = {}
    for path in sorted(folder.glob(f"{task}-*")):
        found = re.fullmatch(rf"{re.escape(task)}-(?:plain(\d+)-)?s\d+", path.name)
        if found is None or not (path / METRICS).is_file():
            continue
        _, recipe, _, _ = load_run(path)
        # Not the iteration of its weights: they may be the best ones, of earlier.
        if _last(read_metrics(path / METRICS)).get("iteration", 0) < recipe.optim.iterations:
            print(f"left out, still in training: {path.name}", file=sys.stderr)
        elif found[1] is None:
            dials.append(path)
        else:
            plain.setdefault(int(found[1]), []).append(path)
    return dials, dict(sorted(plain.items()))


def measured(folder: Path, counts: Sequence[int], data: str = "") -> Measured:
    model, recipe, tokenizer, facts = load_run(folder)
    dataset = open_dataset(data_at(recipe, data), tokenizer)
    labelled = dataset.labels is not None
    counts = [1] if model.discrete else counts
    tallies = {count: Tally() for count in counts}
    rows = hashlib.sha256()
    with torch.no_grad():
        for batch in dataset.held_out(rows_at_once(recipe, dataset.sizes)):
            for one in (*batch.inputs, batch.targets):
                rows.update(one.numpy().tobytes())
            for count, tally in tallies.items():
                output = model(*batch.inputs, steps=count, method=recipe.steps.method)
                tally.add(batch, output.logits, float(output.cost))
    spent = _spent(folder)
    return Measured(
        name=folder.name,
        seed=recipe.run.seed,
        parameters=facts["parameters"],
        full=steps_of(recipe).full,
        trained=spent.get("evaluations", 0),
        cpu_s=spent.get("cpu_s", 0.0),
        qualities={count: tally.quality(labelled) for count, tally in tallies.items()},
        per_row={count: tally.per_row(labelled) for count, tally in tallies.items()},
        rows=rows.hexdigest(),
    )


def _spent(folder: Path) -> dict[str, Any]:
    return _last([record for record in read_metrics(folder / METRICS) if "cpu_s" in record])


def _last(records: list[dict[str, Any]]) -> dict[str, Any]:
    return records[-1] if records else {}


def paired(found: Sequence[Measured], first: int, other: int) -> Gain:
    """How much better `other` steps are than `first`: rows and seeds together.

    The seeds' own differences are averaged; the interval takes the rows as drawn, and the seeds as
    they are. Rows that several seeds were measured on are drawn once: they count as one row each.
    """
    metric = found[0].qualities[first].metric
    sharing: dict[str, list[Measured]] = {}
    for one in found:
        sharing.setdefault(one.rows, []).append(one)
    better = squares = 0.0
    for runs in sharing.values():
        per_row, others = (
            np.mean([one.per_row[count] for one in runs], axis=0) for count in (first, other)
        )
        each, share = gain(per_row, others, metric), len(runs) / len(found)
        better += share * each.better
        squares += (share * each.half) ** 2
    return Gain(better, math.sqrt(squares))


def _text(found: Gain) -> str:
    return f"{found.better:+.4f} ± {found.half:.4f}"


def says(
    found: Sequence[Measured], beside: Mapping[int, Sequence[Measured]]
) -> list[Sequence[Cell]]:
    """What the rungs say, in the words of a table."""
    counts = sorted(found[0].qualities)
    metric, full = found[0].qualities[counts[0]].metric, found[0].full
    sign = -1.0 if metric == "loss" else 1.0

    def gained(base: float, count: int) -> float:
        return sign * (fmean(one.qualities[count].value for one in found) - base)

    first, trained = counts[0], max(count for count in counts if count <= max(full, counts[0]))
    ranges = [sign * (o.qualities[trained].value - o.qualities[first].value) for o in found]
    rows: list[Sequence[Cell]] = [
        ["range", f"{_text(paired(found, first, trained))} between {first} and {trained} steps"],
        ["range of each seed", ", ".join(f"{one:+.4f}" for one in ranges)],
        ["each rung", rising(found, counts)],
    ]
    beyond = [count for count in counts if count > full]
    if beyond:
        best = paired(found, trained, beyond[-1])
        rows.append([f"beyond training, {beyond[-1]} steps beside {trained}", _text(best)])
    values = {blocks: fmean(one.value for one in runs) for blocks, runs in beside.items() if runs}
    if 1 in values:
        rows.append(["first rung beside plain of 1 block", f"{gained(values[1], first):+.4f}"])
        lead = gained(values[1], trained)
        rows.append([f"lead at {trained} steps over plain of 1 block", f"{lead:+.4f}"])
        for blocks, value in values.items():
            if blocks == 1:
                continue
            depth = sign * (value - values[1])
            rows += [
                [
                    f"what {blocks} plain blocks are worth over 1",
                    f"{depth:+.4f}, {gate(depth, metric)}",
                ],
                [
                    f"lead at {trained} steps over {blocks} plain blocks",
                    f"{gained(value, trained):+.4f}",
                ],
            ]
            if depth > 0:
                rows.append(
                    [f"share of the lead of {blocks} blocks recovered", f"{lead / depth:.2f}"]
                )
        rows.append(["parameters at equal quality", saved(found, beside, trained, sign)])
    return rows


def gate(depth: float, metric: str) -> str:
    needed = GATE[metric]
    return (
        f"at least {needed:g}: depth helps here"
        if depth >= needed
        else f"below {needed:g}: no dial has range here"
    )


def rising(found: Sequence[Measured], counts: Sequence[int]) -> str:
    """Whether each rung is better than the one before it, beyond its interval."""
    steps = [(a, b, paired(found, a, b)) for a, b in itertools.pairwise(counts)]
    falls = [
        f"{b} steps are worse than {a} by {-p.better:.4f}"
        for a, b, p in steps
        if p.better < -p.half
    ]
    if falls:
        return "not monotone: " + "; ".join(falls)
    flat = [f"{a} to {b}" for a, b, p in steps if p.better <= p.half]
    return (
        f"monotone; no gain beyond the interval from {', '.join(flat)}"
        if flat
        else "strictly rising"
    )


def saved(
    found: Sequence[Measured],
    beside: Mapping[int, Sequence[Measured]],
    count: int,
    sign: float,
) -> str:
    """The smallest plain model that is as good, beside the dial's own size."""
    mine, value = found[0].parameters, fmean(one.qualities[count].value for one in found)
    good = [
        runs[0].parameters
        for runs in beside.values()
        if runs and sign * (fmean(one.value for one in runs) - value) >= 0
    ]
    if good:
        return f"{mine} against {min(good)} of the smallest plain model that is as good"
    largest = max(runs[0].parameters for runs in beside.values() if runs)
    return f"{mine}; no plain model up to {largest} is as good"


def ladder_table(found: Sequence[Measured], beside: Mapping[int, Sequence[Measured]]) -> Table:
    counts = sorted(found[0].qualities)
    rows: list[Sequence[Cell]] = []
    for one in found:
        for count in counts:
            rows.append(_row(one, f"{count} steps", one.qualities[count]))
    for blocks, runs in beside.items():
        for one in runs:
            rows.append(_row(one, f"plain, {blocks} block{'s' * (blocks > 1)}", one.qualities[1]))
    caption = (
        "whole: of several answers a row, the share of rows that are right in all. trained: "
        "evaluations of the blocks in training, forward and back; CPU seconds are of a machine "
        "that was busy with other work."
    )
    columns = (
        "run",
        "what",
        "parameters",
        "metric",
        "value",
        "low",
        "high",
        "whole",
        "trained",
        "CPU s",
    )
    return Table(caption, columns, rows)


def _row(one: Measured, what: str, quality: Quality) -> Sequence[Cell]:
    shown = [f"{value:.4f}" for value in (quality.value, quality.low, quality.high)]
    whole = None if quality.whole is None else f"{quality.whole:.4f}"
    return [one.name, what, one.parameters, quality.metric, *shown, whole, one.trained, one.cpu_s]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
