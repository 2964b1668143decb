"""Measures trained runs at every step count and method, and keeps what the results page shows.

    python -m benchmarks.papers.measure runs/mnist-0 --group mnist --data PATH --methods all

The weights stay where they are; only figures are kept.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import command_line, commit, this_machine, today
from benchmarks.papers.measured import FOLDER, Measured, Moment, Point, counts_of
from train.checkpoint import RunError, load_run
from train.data import open_dataset
from train.evaluate import Report, evaluate_run, methods_named
from train.loop import unfinished
from train.metrics import METRICS
from train.recipe import Recipe, data_at
from train.text_quality import bleu_of, open_translator

CURVE_MOMENTS = 60


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    recipes = [_ended(run, parsed.data) for run in parsed.runs]
    for run, recipe in zip(parsed.runs, recipes, strict=True):
        counts = counts_of(parsed.steps, recipe)
        methods = methods_named(parsed.methods) if parsed.methods else None
        report = evaluate_run(run, counts, methods, parsed.data)
        command = command_line("benchmarks.papers.measure", arguments)
        one = measured(run, parsed.group, report, command)
        if parsed.bleu:
            one = with_bleu(one, run, counts, parsed.data, parsed.beams, parsed.length_penalty)
        print(one.write(parsed.results))
        for point in one.points:
            print(f"  {point.method:>8} {point.steps or '':>3} {point.metric} {point.value:.4f}")
    return 0


def with_bleu(
    one: Measured, folder: Path, counts: list[int], data: str, beams: int, alpha: float
) -> Measured:
    """The record with corpus BLEU of the test split, at each step count."""
    run, dataset = open_translator(folder, data)
    method = run.recipe.steps.method
    scores, signature = {}, ""
    for count in [1] if run.model.discrete else counts:
        found = bleu_of(run, dataset, count, method, beams, alpha=alpha)
        scores[str(count)] = found.score
        signature = f"{found.signature}, beams {beams}, length penalty {alpha:g}"
        print(f"  BLEU at {count}: {found.score:.2f}")
    return dataclasses.replace(one, bleu=scores, bleu_signature=signature)


def _ended(folder: Path, data: str) -> Recipe:
    """The recipe of a run that has ended: half a training would pass for what its recipe can do."""
    run = load_run(folder)
    recipe = data_at(run.recipe, data)
    if came := unfinished(folder, recipe, open_dataset(recipe, run.tokenizer)):
        raise RunError(f"{folder} has done {came}: go on with it first")
    return recipe


def measured(folder: Path, group: str | None, report: Report, command: str) -> Measured:
    """The record of a run and of its evaluation."""
    run = load_run(folder)
    recipe = run.recipe.to_json()
    recipe["data"]["path"] = ""
    seed = run.recipe.run.seed
    curve, evaluations, cpu_s = _curve(folder / METRICS)
    named = group or run.recipe.name
    return Measured(
        name=f"{named}-{seed}",
        group=named,
        seed=seed,
        recipe=recipe,
        parameters=int(run.facts["parameters"]),
        iterations=int(run.facts["iteration"]),
        evaluations=evaluations,
        cpu_s=cpu_s,
        points=[_point(row) for row in report.rows],
        jumps={
            method: {str(spent): share for spent, share in shares.items()}
            for method, shares in report.jumps.items()
        },
        stability=report.stability.ratio,
        curve=curve,
        command=command,
        commit=commit(),
        date=today(),
        machine=this_machine(),
    )


def _point(row: Any) -> Point:
    quality = dataclasses.asdict(row.quality)
    wanted = {field.name for field in dataclasses.fields(Point)}
    known = {key: value for key, value in quality.items() if key in wanted}
    return Point(
        method=row.method,
        steps=row.steps,
        nfe=row.nfe,
        gap=row.gap,
        agreement=row.agreement,
        **known,
    )


def _curve(path: Path) -> tuple[list[Moment], int, float | None]:
    """Moments of a metrics file, the evaluations of the whole run, and its CPU seconds."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    watched = [record for record in records if "validation" in record]
    every = max(1, len(watched) // CURVE_MOMENTS)
    chosen = watched[::every]
    if watched and chosen[-1] is not watched[-1]:
        chosen.append(watched[-1])
    moments = [
        Moment(
            record["iteration"], record.get("evaluations", 0), record["loss"], record["validation"]
        )
        for record in chosen
    ]
    last = watched[-1] if watched else {}
    return moments, int(last.get("evaluations", 0)), last.get("cpu_s")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    made.add_argument("--group", help="what runs that differ in their seed only are called")
    made.add_argument("--data", default="", metavar="PATH", help="where the data is now")
    made.add_argument(
        "--steps",
        default="1,2,4,8",
        help="step counts, besides that of the training (default 1,2,4,8)",
    )
    made.add_argument("--methods", help="`all`, or methods separated by commas")
    made.add_argument("--bleu", action="store_true", help="translators: BLEU as well")
    made.add_argument("--beams", type=int, default=4, help="of --bleu (default 4)")
    made.add_argument("--length-penalty", type=float, default=0.6, help="of --bleu (default 0.6)")
    made.add_argument("--results", type=Path, default=FOLDER, help="where to keep it")
    return made


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.papers.measure: {error}")
