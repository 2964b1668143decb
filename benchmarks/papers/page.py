"""Writes docs/results.md and its pictures from what was kept and the published figures.

    python -m benchmarks.papers.page

Measures nothing. Experiments without a measured run are listed as not run yet.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import ROOT
from benchmarks.papers.frontier import frontier_section
from benchmarks.papers.measured import Measured, read_all
from benchmarks.papers.plots import draw_curves, draw_quality
from benchmarks.papers.screened import screen_section
from benchmarks.papers.screens import SCREENED, Screen, read_screens
from benchmarks.papers.tables import mean, provenance, quality, table

PUBLISHED = Path(__file__).parent / "published.toml"
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "results"
_HEAD = """# The experiments of the papers

Written by `python -m benchmarks.papers.page` from `measured/*.json`, `screened/*.json`,
`published.toml` and `screens.toml` of `benchmarks/papers`; do not edit. Quality is on held-out
data: accuracy in %, loss in nats a token. "Evaluations" are passes of a batch through the velocity
in training: what training cost. Where several seeds were trained, a cell is their mean ± their
standard deviation.
"""

Groups = dict[str, list[Measured]]


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    groups = read_all()
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    experiments = published["experiment"]
    PICTURES.mkdir(parents=True, exist_ok=True)
    page = render(published, groups, read_screens(), read_all(SCREENED))
    PAGE.write_text(page, encoding="utf-8")
    for experiment in experiments:
        _draw(experiment, groups)
    print(f"written: {PAGE}")
    return 0


def render(
    published: Mapping[str, Any],
    groups: Groups,
    screens: Mapping[str, Screen],
    screened: Groups,
) -> str:
    """The text of the page."""
    experiments: Sequence[dict[str, Any]] = published["experiment"]
    named = {group for experiment in experiments for group in experiment["runs"]}
    unknown = sorted(set(groups) - named)
    if unknown:
        raise ValueError(f"measured, but no experiment of published.toml names: {unknown}")
    named = {screen.group(one) for screen in screens.values() for one in screen.variants}
    unknown = sorted(set(screened) - named)
    if unknown:
        raise ValueError(f"screened, but no screen of screens.toml names: {unknown}")
    frontier = published.get("frontier")
    claims = published.get("claim")
    sections = [_claims(claims, groups)] if claims else []
    sections += [frontier_section(frontier, groups)] if frontier else []
    sections += [_section(experiment, groups) for experiment in experiments]
    sections += [screen_section(screen, screened) for screen in screens.values()]
    return "\n".join([_HEAD, *sections])


def _section(experiment: dict[str, Any], groups: Groups) -> str:
    parts = [f"## {experiment['title']}"]
    if experiment.get("note"):
        parts.append(experiment["note"].strip())
    paper = [[what, value] for what, value in experiment["paper"]]
    if paper:
        parts.append(table([f"in the paper ({experiment['source']})", ""], paper))
    present = [(name, groups[name]) for name in experiment["runs"] if name in groups]
    absent = [name for name in experiment["runs"] if name not in groups]
    if present:
        parts += [_quality_table(present, _differences(experiment, present)), _path_table(present)]
        parts += [rows for name, runs in present if (rows := _method_table(name, runs))]
        parts.append(_pictures(experiment["id"], present))
        parts.append(provenance(present))
    if absent:
        parts.append(f"Not run yet: {', '.join(f'`{name}`' for name in absent)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _differences(
    experiment: Mapping[str, Any], present: list[tuple[str, list[Measured]]]
) -> Mapping[str, str]:
    """How each run that stands beside a paper's figures differs from the paper's; none may miss."""
    if not experiment["paper"]:
        return {}
    said: Mapping[str, str] = experiment.get("differs", {})
    silent = [name for name, _ in present if name not in said]
    if silent:
        raise ValueError(
            f"{experiment['id']}: {', '.join(silent)} stand beside a paper's figures; say under "
            "`differs` of published.toml what is not as there"
        )
    return said


def _claims(claims: Sequence[Mapping[str, Any]], groups: Groups) -> str:
    """What the papers say, what was found here, and what to make of it."""
    rows = []
    for claim in claims:
        found = []
        for what, group, steps in claim["here"]:
            points = [p for run in groups.get(group, []) if (p := run.at(steps)) is not None]
            seeds = f", {len(points)} seed{'s' if len(points) > 1 else ''}"
            found.append(f"{what}: {quality(points) + seeds if points else 'not run yet'}")
        rows.append([claim["paper"], "; ".join(found) or "–", claim["verdict"]])
    head = "## What the papers claim, and what was found here\n\n"
    return head + table(["claim", "found here", "verdict"], rows) + "\n"


def _quality_table(present: list[tuple[str, list[Measured]]], differs: Mapping[str, str]) -> str:
    counts = sorted({p.steps for _, runs in present for r in runs for p in r.points if p.steps})
    header = ["measured here", "seeds", "parameters", "evaluations", "CPU s"]
    header += [f"{count} step{'s' if count > 1 else ''}" for count in counts]
    scored = any(run.bleu for _, runs in present for run in runs)
    header += ["BLEU at most steps"] if scored else []
    header += ["not as in the paper"] if differs else []
    rows = []
    for name, runs in present:
        cells = [name, str(len(runs)), f"{runs[0].parameters:,}"]
        cells.append(mean([run.evaluations for run in runs], "{:,.0f}"))
        cells.append(mean([run.cpu_s for run in runs if run.cpu_s is not None], "{:,.0f}"))
        for count in counts:
            found = [point for run in runs if (point := run.at(count)) is not None]
            cells.append(quality(found) if len(found) == len(runs) else "–")
        if scored:
            best = [run.bleu[max(run.bleu, key=int)] for run in runs if run.bleu]
            cells.append(mean(best, "{:.1f}"))
        rows.append([*cells, differs[name]] if differs else cells)
    return table(header, rows)


def _path_table(present: list[tuple[str, list[Measured]]]) -> str:
    """How straight the paths are, of the models with more than one step count."""
    header = ["paths", "transport cost", "straightness gap", "lambda / T L²"]
    header += [f"jump after {k} agrees with full" for k in (1, 2, 4)]
    rows = []
    for name, runs in present:
        fulls = [max(run.points, key=lambda p: p.steps or 0) for run in runs]
        if all((full.steps or 0) <= 1 for full in fulls):
            continue
        cells = [name, mean([p.cost for p in fulls], "{:.3g}")]
        cells.append(mean([p.gap for p in fulls], "{:.3g}"))
        cells.append(mean([run.stability for run in runs], "{:.3g}"))
        for spent in ("1", "2", "4"):
            shares = [run.jumps.get(run.trained_method, {}).get(spent) for run in runs]
            known = [100 * share for share in shares if share is not None]
            cells.append(mean(known, "{:.1f} %") if known else "–")
        rows.append(cells)
    return table(header, rows) if rows else ""


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
            cells.append(quality(found) if len(found) == len(runs) else "–")
        rows.append(cells)
    return table([f"{name}, by evaluations", *map(str, spent)], rows)


def _pictures(name: str, present: list[tuple[str, list[Measured]]]) -> str:
    shown = f"![{name}: quality against steps](results/{name}-steps.png)"
    if any(run.curve for _, runs in present for run in runs):
        shown += f"\n![{name}: training](results/{name}-training.png)"
    return shown


def _draw(experiment: dict[str, Any], groups: Groups) -> None:
    present = {name: groups[name] for name in experiment["runs"] if name in groups}
    if not present:
        return
    draw_quality(experiment["title"], present, PICTURES / f"{experiment['id']}-steps.png")
    if any(run.curve for runs in present.values() for run in runs):
        draw_curves(experiment["title"], present, PICTURES / f"{experiment['id']}-training.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
