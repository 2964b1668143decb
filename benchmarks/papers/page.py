"""Writes docs/results.md and its pictures from the kept measurements and the published figures.

    python -m benchmarks.papers.page

Measures nothing. Experiments without a measured run are listed as not run yet.
"""

import statistics
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, Machine
from benchmarks.papers.measured import Measured, Point, read_all
from benchmarks.papers.plots import draw_curves, draw_quality

PUBLISHED = Path(__file__).parent / "published.toml"
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "results"
_HEAD = """# The experiments of the papers

Written by `python -m benchmarks.papers.page` from `benchmarks/papers/measured/*.json` and
`published.toml`; do not edit. Quality is on held-out data: accuracy in %, loss in nats a token.
"Evaluations" are passes of a batch through the velocity in training: what training cost. Where
several seeds were trained, a cell is their mean ± their standard deviation.
"""

Groups = dict[str, list[Measured]]


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    groups = read_all()
    experiments = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["experiment"]
    PICTURES.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(experiments, groups), encoding="utf-8")
    for experiment in experiments:
        _draw(experiment, groups)
    print(f"written: {PAGE}")
    return 0


def render(experiments: Sequence[dict[str, Any]], groups: Groups) -> str:
    """The text of the page."""
    named = {group for experiment in experiments for group in experiment["runs"]}
    unknown = sorted(set(groups) - named)
    if unknown:
        raise ValueError(f"measured, but no experiment of published.toml names: {unknown}")
    return "\n".join([_HEAD, *(_section(experiment, groups) for experiment in experiments)])


def _section(experiment: dict[str, Any], groups: Groups) -> str:
    parts = [f"## {experiment['title']}"]
    if experiment.get("note"):
        parts.append(experiment["note"].strip())
    paper = [[what, value] for what, value in experiment["paper"]]
    if paper:
        parts.append(_table([f"in the paper ({experiment['source']})", ""], paper))
    present = [(name, groups[name]) for name in experiment["runs"] if name in groups]
    absent = [name for name in experiment["runs"] if name not in groups]
    if present:
        parts += [_quality_table(present), _path_table(present)]
        parts += [table for name, runs in present if (table := _method_table(name, runs))]
        parts.append(_pictures(experiment["id"], present))
        parts.append(_provenance(present))
    if absent:
        parts.append(f"Not run yet: {', '.join(f'`{name}`' for name in absent)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _quality_table(present: list[tuple[str, list[Measured]]]) -> str:
    counts = sorted({p.steps for _, runs in present for r in runs for p in r.points if p.steps})
    header = ["measured here", "seeds", "parameters", "evaluations", "CPU s"]
    header += [f"{count} step{'s' if count > 1 else ''}" for count in counts]
    rows = []
    for name, runs in present:
        cells = [name, str(len(runs)), f"{runs[0].parameters:,}", f"{runs[0].evaluations:,}"]
        cells.append(_mean([run.cpu_s for run in runs if run.cpu_s is not None], "{:,.0f}"))
        for count in counts:
            found = [point for run in runs if (point := run.at(count)) is not None]
            cells.append(_quality(found) if len(found) == len(runs) else "–")
        rows.append(cells)
    return _table(header, rows)


def _path_table(present: list[tuple[str, list[Measured]]]) -> str:
    """How straight the paths are, of the models with more than one step count."""
    header = ["paths", "transport cost", "straightness gap", "lambda / T L²"]
    header += [f"jump after {k} agrees with full" for k in (1, 2, 4)]
    rows = []
    for name, runs in present:
        fulls = [max(run.points, key=lambda p: p.steps or 0) for run in runs]
        if all((full.steps or 0) <= 1 for full in fulls):
            continue
        cells = [name, _mean([p.cost for p in fulls], "{:.3g}")]
        cells.append(_mean([p.gap for p in fulls], "{:.3g}"))
        cells.append(_mean([run.stability for run in runs], "{:.3g}"))
        for spent in ("1", "2", "4"):
            shares = [run.jumps.get(run.trained_method, {}).get(spent) for run in runs]
            known = [100 * share for share in shares if share is not None]
            cells.append(_mean(known, "{:.1f} %") if known else "–")
        rows.append(cells)
    return _table(header, rows) if rows else ""


def _method_table(name: str, runs: list[Measured]) -> str:
    """Quality by velocity evaluations, where a run was measured with several methods."""
    methods = list(dict.fromkeys(point.method for point in runs[0].points))
    if len(methods) < 2:
        return ""
    spent = sorted({int(point.nfe) for point in runs[0].points})
    rows = []
    for method in methods:
        cells = [method]
        for nfe in spent:
            found = [p for run in runs for p in run.points if p.method == method and p.nfe == nfe]
            cells.append(_quality(found) if len(found) == len(runs) else "–")
        rows.append(cells)
    return _table([f"{name}, by evaluations", *map(str, spent)], rows)


def _pictures(name: str, present: list[tuple[str, list[Measured]]]) -> str:
    shown = f"![{name}: quality against steps](results/{name}-steps.png)"
    if any(run.curve for _, runs in present for run in runs):
        shown += f"\n![{name}: training](results/{name}-training.png)"
    return shown


def _provenance(present: list[tuple[str, list[Measured]]]) -> str:
    runs = [run for _, group in present for run in group]
    machines = sorted({f"{m.cores} cores of {m.cpu}, {m.memory_gb:g} GB" for m in _machines(runs)})
    commits = sorted({run.commit for run in runs})
    dates = sorted({run.date.partition(" ")[0] for run in runs})
    load = max(m.load for m in _machines(runs))
    data = sorted({str(point.samples) for run in runs for point in run.points})
    return (
        f"Held-out samples: {', '.join(data)}. Measured {' and '.join(dates)} at "
        f"{', '.join(commits)}; commands such as `{runs[0].command}`. "
        f"Machine: {'; '.join(machines)}; load average up to {load:.1f}: CPU seconds are inflated."
    )


def _machines(runs: Sequence[Measured]) -> list[Machine]:
    return [run.machine for run in runs]


def _draw(experiment: dict[str, Any], groups: Groups) -> None:
    present = {name: groups[name] for name in experiment["runs"] if name in groups}
    if not present:
        return
    draw_quality(experiment["title"], present, PICTURES / f"{experiment['id']}-steps.png")
    if any(run.curve for runs in present.values() for run in runs):
        draw_curves(experiment["title"], present, PICTURES / f"{experiment['id']}-training.png")


def _quality(points: list[Point]) -> str:
    if points[0].metric == "accuracy":
        return _mean([100 * point.value for point in points], "{:.2f}")
    return _mean([point.value for point in points], "{:.3f}")


def _mean(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    write: Callable[[float], str] = form.format
    if len(values) == 1:
        return write(values[0])
    return f"{write(statistics.mean(values))} ± {write(statistics.stdev(values))}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
