"""Writes docs/results.md, benchmarks/papers/README.md and its pictures from what was kept.

    python -m benchmarks.papers.page
    python -m benchmarks.papers.page --tables --runs RUNS

Measures nothing. Experiments without a measured run are listed as not run yet.
"""

import argparse
import dataclasses
import itertools
import math
import re
import statistics
import string
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import Cell, Machine, Result, Table
from benchmarks.papers.measured import FOLDER as MEASURED
from benchmarks.papers.measured import Measured, Point, read_all
from benchmarks.papers.queue import PLAN, Place, read_plan, state
from benchmarks.papers.screens import SCREENED, Screen, read_screens
from train.evaluate import ADAPTIVE

# The pictures of the results page: quality against steps, and training curves.


AnyGroups = Mapping[str, Sequence[Measured]]
LEVELS = ("--", "-.", ":")  # of models of one depth; three of a shade of grey


def draw_quality(title: str, groups: AnyGroups, path: Path) -> None:
    """One line a group; models of one depth are level lines."""
    figure, axes = _canvas(title)
    metric, levels = "loss", itertools.count()
    for name, runs in groups.items():
        metric = runs[0].points[0].metric
        counts = sorted({p.steps for run in runs for p in run.points if p.steps})
        means = []
        for count in counts:
            found = [point.value for run in runs if (point := run.at(count)) is not None]
            means.append(statistics.mean(found))
        if len(counts) == 1:
            level = next(levels)
            style, grey = LEVELS[level % 3], f"{min(0.7, 0.2 + 0.25 * (level // 3)):.2f}"
            axes.axhline(means[0], linestyle=style, linewidth=1, label=name, color=grey)
        else:
            axes.plot(counts, means, marker="o", markersize=4, label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("steps")
    axes.set_ylabel("loss (nats a token)" if metric == "loss" else metric)
    _finish(figure, axes, path)


def draw_curves(title: str, groups: AnyGroups, path: Path) -> None:
    """Validation quality at the largest watched count against evaluations spent."""
    figure, axes = _canvas(title)
    label = ""
    for name, runs in groups.items():
        moments = runs[0].curve
        if not moments:
            continue
        label = max(moments[-1].validation, key=_steps)
        seen = [m for m in moments if label in m.validation]
        axes.plot([m.evaluations for m in seen], [m.validation[label] for m in seen], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("velocity evaluations spent in training")
    axes.set_ylabel(f"validation {label.partition('@')[0]}, full steps")
    _finish(figure, axes, path)


def _steps(label: str) -> int:
    """Of `accuracy@8`, 8; a solver that chooses its own steps goes last."""
    steps = label.partition("@")[2]
    return int(steps) if steps.isdigit() else 0


def _canvas(title: str) -> tuple[Any, Any]:
    import matplotlib
    from cycler import cycler

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.8, 3.8), layout="constrained")
    colours = matplotlib.rcParams["axes.prop_cycle"]
    axes.set_prop_cycle(cycler(linestyle=["-", ":"]) * colours)  # ten, then ten dotted
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    # Beside the lines: within they would hide some.
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


# Cells and tables of the results page: means over seeds, the best in bold, what was measured on.


_FORMS = {"accuracy": "{:.2f}", "loss": "{:.3f}", "agreement": "{:.1f}"}


def marked(found: Sequence[Sequence[float]], metric: str) -> list[str]:
    """The mean of each, the best in bold; a dash where there is nothing."""
    cells = [mean(values, _FORMS[metric]) for values in found]
    means = [statistics.mean(values) for values in found if values]
    best = (min if metric == "loss" else max)(means, default=None)
    return [
        f"**{cell}**" if values and statistics.mean(values) == best else cell
        for values, cell in zip(found, cells, strict=True)
    ]


def quality(points: list[Point]) -> str:
    return mean(figures(points), _FORMS[points[0].metric])


def figures(points: Sequence[Point]) -> list[float]:
    """Values as they are shown."""
    return [100 * p.value if p.metric == "accuracy" else p.value for p in points]


def mean(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    write: Callable[[float], str] = form.format
    if len(values) == 1:
        return write(values[0])
    return f"{write(statistics.mean(values))} ± {write(statistics.stdev(values))}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def provenance(present: list[tuple[str, list[Measured]]]) -> str:
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


_TITLE = "One model for every step count, or one for each"


def frontier_section(section: Mapping[str, Any], groups: AnyGroups) -> str:
    """The section, with a table for each comparison of which everything has been measured."""
    parts = [f"## {_TITLE}", section["note"].strip()]
    for one in section["compared"]:
        needed = [one["any"], *one["fixed"].values(), one["discrete"]]
        absent = ", ".join(f"`{name}`" for name in needed if name not in groups)
        what = one["what"]
        parts.append(f"{what}: not run yet: {absent}." if absent else _table(one, groups))
    return "\n\n".join(parts) + "\n"


def _table(one: Mapping[str, Any], groups: AnyGroups) -> str:
    any_step, discrete = groups[one["any"]], groups[one["discrete"]]
    fixed = {int(count): groups[name] for count, name in one["fixed"].items()}
    counts = sorted(fixed)
    metric = any_step[0].points[0].metric
    unit = "%" if metric == "accuracy" else "nats"
    header = [f"{one['what']}, {unit}"]
    header += [f"{count} evaluation{'s' if count > 1 else ''}" for count in counts]
    header += ["evaluations in training", "parameters"]
    rows = [
        ["one model for any count"]
        + [_quality(any_step, count) for count in counts]
        + _cost([any_step]),
        ["a model for each count"]
        + [_quality(fixed[count], count) for count in counts]
        + _cost(list(fixed.values())),
        ["the largest count's alone"]
        + [_quality(fixed[counts[-1]], count) for count in counts]
        + _cost([fixed[counts[-1]]]),
        ["discrete transformer", _quality(discrete, 1)]
        + ["–"] * (len(counts) - 1)
        + _cost([discrete]),
    ]
    better = 1 if metric == "accuracy" else -1
    for what, others in (
        ("any count, ahead of a model for each by", [_mean(fixed[n], n) for n in counts]),
        ("ahead of the discrete transformer by", [_mean(discrete, 1)] * len(counts)),
    ):
        ahead = [
            better * (_mean(any_step, n) - other) for n, other in zip(counts, others, strict=True)
        ]
        form = "{:+.2f}" if metric == "accuracy" else "{:+.3f}"
        rows.append([what, *map(form.format, ahead), "", ""])
    return table(header, rows)


def _quality(runs: Sequence[Measured], count: int) -> str:
    return quality([run.need(count) for run in runs])


def _mean(runs: Sequence[Measured], count: int) -> float:
    return statistics.mean(figures([run.need(count) for run in runs]))


def _cost(models: Sequence[Sequence[Measured]]) -> list[str]:
    evaluations = sum(statistics.mean(run.evaluations for run in runs) for runs in models)
    return [f"{evaluations:,.0f}", f"{sum(runs[0].parameters for runs in models):,}"]


# The section of the results page that shows a screen: its variants side by side.


Groups = dict[str, list[Measured]]


def screen_section(screen: Screen, groups: Groups) -> str:
    """The variants of a screen side by side."""
    found = {one: groups.get(screen.group(one), []) for one in screen.variants}
    present = [(f"`{one.name}`", runs) for one, runs in found.items() if runs]
    absent = [f"`{one.name}`" for one, runs in found.items() if not runs]
    parts = [f"## Any step count: a screen on {screen.title}", _introduction(screen)]
    if present:
        parts += [
            screen.note.strip(),
            _screen_quality_table(present),
            _screen_method_table(present),
        ]
        parts += [sentence for name, runs in present if (sentence := _diverged(name, runs))]
        sets = [
            [f"`{one.name}`", ", ".join(f"`{override}`" for override in one.overrides)]
            for one, runs in found.items()
            if runs
        ]
        parts += [table(["variant", "sets"], sets), provenance(present)]
    if absent:
        parts.append(f"Not run yet: {', '.join(absent)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(screen: Screen) -> str:
    base = ", ".join(f"`{override}`" for override in screen.base)
    return (
        f"Recipe `{screen.recipe}` with {base}, and what a variant sets. Every variant is trained "
        f"for about {screen.evaluations:,} velocity evaluations: far from the end, so only large "
        "differences mean anything. The best of a column is bold."
    )


def _screen_quality_table(present: list[tuple[str, list[Measured]]]) -> str:
    counts = sorted({p.steps for _, runs in present for r in runs for p in r.points if p.steps})
    metric = present[0][1][0].points[0].metric
    columns = [[name for name, _ in present]]
    for count in counts:
        points = [[p for run in runs if (p := run.at(count)) is not None] for _, runs in present]
        columns.append(marked([figures(some) for some in points], metric))
    columns.append(marked([_jumps(runs) for _, runs in present], "agreement"))
    columns.append([mean([run.evaluations for run in runs], "{:,.0f}") for _, runs in present])
    seconds = [[run.cpu_s for run in runs if run.cpu_s is not None] for _, runs in present]
    columns.append([mean(some, "{:,.0f}") for some in seconds])
    header = ["variant", *(f"{count} step{'s' if count > 1 else ''}" for count in counts)]
    header += ["jump after 1 agrees with full, %", "evaluations", "CPU s"]
    return table(header, list(zip(*columns, strict=True)))


def _jumps(runs: list[Measured]) -> list[float]:
    """In %; where training knows one step only, the jump is the full answer by definition."""
    longer = [run for run in runs if run.recipe["steps"]["full"] > 1]
    return [100 * run.jumps[run.trained_method]["1"] for run in longer]


def _screen_method_table(present: list[tuple[str, list[Measured]]], nfe: int = 4) -> str:
    """Every method at one cost; none but that of the training was trained for."""
    methods = list(dict.fromkeys(p.method for _, runs in present for p in runs[0].points))
    rows = []
    for name, runs in present:
        points = [
            [p for run in runs for p in run.points if p.method == method and p.nfe == nfe]
            for method in methods
        ]
        metric = runs[0].points[0].metric
        rows.append([name, *marked([figures(some) for some in points], metric)])
    title = f"at {nfe} evaluations; the best of a row is bold"
    return table([title, *methods], rows)


def _diverged(name: str, runs: list[Measured]) -> str:
    short = [run for run in runs if run.iterations < run.recipe["optim"]["iterations"]]
    return "; ".join(
        f"{name} (seed {run.seed}) diverged: it is shown as it was after {run.iterations:,} of "
        f"{run.recipe['optim']['iterations']:,} iterations"
        for run in short
    )


# Fewer parameters, and sensitivity to one setting: what the queue trains, set side by side. What is
# not finished says so.


STEPS_SHOWN = (1, 2, 4, 8)


def not_run(group: str) -> str:
    return "not run yet"


def tables_sections(
    published: Mapping[str, Any],
    groups: AnyGroups,
    latency: Result | None = None,
    said: Callable[[str], str] = not_run,
) -> list[str]:
    times = {one.caption: one for one in latency.tables} if latency else {}
    reduced = [
        _reduced_table(one, groups, times.get(one["task"]), said)
        for one in published.get("reduced", [])
    ]
    swept = [_sweep_table(one, groups, said) for one in published.get("sweep", [])]
    if not reduced and not swept:
        return []
    parts = [
        ["## Fewer parameters", published["reduced_note"], *reduced, _source_of(latency)],
        [
            "## The transport cost, setting by setting",
            published["transport_note"],
            _transport_table(published["transport"], groups, said),
        ],
        ["## What lambda and the steps buy", published["sweep_note"], *swept],
    ]
    return ["\n\n".join(part.strip() for part in section if part) + "\n" for section in parts]


def _source_of(latency: Result | None) -> str:
    return f"Milliseconds: {_provenance_of(latency)}" if latency else ""


def _provenance_of(one: Result) -> str:
    return f"`{one.command}` at {one.commit}, {one.date}, on {one.machine.sentence}."


def _transport_table(
    settings: Sequence[Mapping[str, Any]], groups: AnyGroups, said: Callable[[str], str]
) -> str:
    """Each model with the cost beside the same one without, at few steps and at all."""
    rows = []
    for one in settings:
        ours, others = (groups.get(one[name], []) for name in ("with", "without"))
        absent = [one[name] for name in ("with", "without") if one[name] not in groups]
        if absent:
            rows.append([one["what"], "; ".join(map(said, absent)), *["–"] * 3])
            continue
        cells = [f"{ours[0].recipe['optim']['transport']:g}"]
        cells += [_compared(ours, others, count) for count in (1, 2)]
        cells.append(f"{_compared(ours, others, one['full'])}, {_count_name(one['full'])}")
        rows.append([one["what"], *cells])
    header = ["with / without the cost", "lambda of the recipe", "1 step", "2 steps", "full steps"]
    return table(header, rows)


def _compared(ours: Sequence[Measured], others: Sequence[Measured], count: int) -> str:
    """Both means, the difference for the better, and in how many seeds it is one."""
    beside = {run.seed: run for run in others}
    pairs = [(run.need(count), beside[run.seed].need(count)) for run in ours if run.seed in beside]
    metric = ours[0].need(count).metric
    better, form = (-1, "{:+.3f}") if metric == "loss" else (1, "{:+.2f}")
    ahead = [better * (a - b) for a, b in (figures(pair) for pair in pairs)]
    means = " / ".join(_FORMS[metric].format(_mean(runs, count)) for runs in (ours, others))
    seeds = f"{sum(one > 0 for one in ahead)} of {len(ahead)}"
    return f"{means}: {mean([statistics.mean(ahead)], form) if ahead else '–'} ({seeds})"


def _reduced_table(
    one: Mapping[str, Any], groups: AnyGroups, times: Table | None, said: Callable[[str], str]
) -> str:
    """An OT model of k parameters beside discrete ones of k and more."""
    counts = sorted({*STEPS_SHOWN, one["full"]})
    ours = groups.get(one["rows"][0][1], [])
    header = [one["task"], "parameters", "of k", *map(_count_name, counts)]
    header += ["OT ahead by", "ms at 1 / full steps", "evaluations", "CPU s", "seeds"]
    rows = []
    for what, name in one["rows"]:
        runs = groups.get(name, [])
        if not runs:
            rows.append([f"{what} (`{name}`)", said(name), *["–"] * (len(header) - 2)])
            continue
        size = runs[0].parameters
        ratio = f"{size / ours[0].parameters:.2f}" if ours else "–"
        rows.append(
            [
                f"{what} (`{name}`)",
                f"{size:,}",
                ratio,
                *(_cell_at(runs, count) for count in counts),
                _ahead(ours, runs, one["full"]) if runs is not ours else "",
                _latency(times, name, one["full"]),
                mean([run.evaluations for run in runs], "{:,.0f}"),
                mean([run.cpu_s for run in runs if run.cpu_s is not None], "{:,.0f}"),
                str(len(runs)),
            ]
        )
    return table(header, rows)


def _count_name(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"


def _cell_at(runs: Sequence[Measured], count: int) -> str:
    found = [point for run in runs if (point := run.at(count)) is not None]
    return quality(found) if len(found) == len(runs) else "–"


def _ahead(ours: Sequence[Measured], others: Sequence[Measured], full: int) -> str:
    """Points of accuracy, or nats, at full steps; of a discrete model, of its one answer."""
    if not ours:
        return "–"
    depth = 1 if others[0].discrete else full
    metric = ours[0].need(full).metric
    better = _mean(ours, full) - _mean(others, depth)
    return f"{better:+.2f}" if metric == "accuracy" else f"{-better:+.3f}"


def _latency(times: Table | None, group: str, full: int) -> str:
    """At one step and at full steps."""
    if times is None:
        return "–"
    found = {steps: ms for name, steps, ms in times.rows if name == group}
    return " / ".join(f"{found[steps]:.2f}" for steps in dict.fromkeys((1, full)) if steps in found)


def _sweep_table(one: Mapping[str, Any], groups: AnyGroups, said: Callable[[str], str]) -> str:
    """Quality, paths and overfitting against one setting of training."""
    counts = one["steps"]
    header = [f"{one['task']}: {one['what']}", *map(_count_name, counts)]
    header += ["transport cost at full steps", "straightness gap at full steps"]
    header += ["validation lost after its best", "seeds"]
    rows = []
    for what, name in one["rows"]:
        runs = groups.get(name, [])
        if not runs:
            rows.append([what, said(name), *["–"] * (len(header) - 2)])
            continue
        fulls = [run.full for run in runs]
        rows.append(
            [
                what,
                *(_cell_at(runs, count) for count in counts),
                mean([point.cost for point in fulls], "{:.3g}"),
                mean([point.gap for point in fulls], "{:.3g}"),
                mean([lost for run in runs if (lost := _lost(run)) is not None], "{:.3f}"),
                str(len(runs)),
            ]
        )
    return table(header, rows)


def _lost(run: Measured) -> float | None:
    """By how much the last validation is worse than the best one, at the largest count watched.

    In nats or points of accuracy.
    """
    label = max((key for moment in run.curve for key in moment.validation), key=_steps, default="")
    seen = [moment.validation[label] for moment in run.curve if label in moment.validation]
    if not seen:
        return None
    if label.startswith("accuracy"):
        return 100 * (max(seen) - seen[-1])
    return seen[-1] - min(seen)


PUBLISHED = Path(__file__).parent / "published.toml"
EXTRA = Path(__file__).parent  # theory.json, speed.json, and what other benchmarks keep there
PAGE = Path(__file__).parent / "README.md"
CLAIMS = Path(__file__).parents[2] / "docs" / "results.md"
PICTURES = Path(__file__).parent / "plots"
_HEAD = """# The experiments of the papers

Every table, and a picture of every training. [docs/results.md](../../docs/results.md) has the
claims of the papers with a verdict on each.

Written by `python -m benchmarks.papers.page` from `measured/*.json`, `screened/*.json`,
`published.toml` and `screens.toml` of `benchmarks/papers`; do not edit. Quality is on held-out
data: accuracy in %, loss in nats a token. "Evaluations" are passes of a batch through the velocity
in training: what training cost. Where several seeds were trained, a cell is their mean ± their
standard deviation.
"""
_CLAIMS_HEAD = "# Results: what the papers claim, and what was found here"
_CLAIMS_END = """All tables and pictures are in [benchmarks/papers](../benchmarks/papers/README.md).
How fast and how good the server and its models are stands in
[RESULTS.md](../benchmarks/RESULTS.md). `python -m benchmarks.papers.page` writes this page; do not
edit it."""


def main(arguments: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--tables", action="store_true", help="only print the tables of the queue")
    made.add_argument("--results", type=Path, default=MEASURED, help="with --tables: figures")
    made.add_argument("--runs", type=Path, help="with --tables: folder of the runs, to say how far")
    parsed = made.parse_args(arguments)
    if parsed.tables:
        print_tables(parsed.results, parsed.runs)
        return 0
    groups = read_all()
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    experiments = published["experiment"]
    PICTURES.mkdir(parents=True, exist_ok=True)
    extra = read_extra()
    CLAIMS.write_text(render_claims(published, groups, extra), encoding="utf-8")
    page = render(published, groups, read_screens(), read_all(SCREENED), extra)
    PAGE.write_text(page, encoding="utf-8")
    for experiment in experiments:
        _draw(experiment, groups)
    print(f"written: {CLAIMS}\nwritten: {PAGE}")
    return 0


def print_tables(results: Path, runs: Path | None) -> None:
    """What the queue has trained, and how far it is with the rest."""
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    place = Place(runs or Path("nowhere"), results=results)
    jobs = read_plan(PLAN)

    def said(group: str) -> str:
        seeds = [f"{job.seed}: {state(job, place)}" for job in jobs if job.group == group]
        return "; ".join(seeds) if runs and seeds else not_run(group)

    latency = {one.name: one for one in read_extra()}.get("latency")
    print("\n".join(tables_sections(published, read_all(results), latency, said)))


def read_extra(folder: Path = EXTRA) -> list[Result]:
    """What was measured by other scripts than the queue: the theorem, robustness."""
    return [Result.read(path) for path in sorted(folder.glob("*.json"))]


def render(
    published: Mapping[str, Any],
    groups: Groups,
    screens: Mapping[str, Screen],
    screened: Groups,
    kept: Sequence[Result] = (),
) -> str:
    """The page of all tables."""
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
    extra = {one.name: one for one in kept}
    sections = tables_sections(published, groups, extra.get("latency"))
    sections += [frontier_section(frontier, groups)] if frontier else []
    sections += [_section(experiment, groups) for experiment in experiments]
    differs = {name: said for one in experiments for name, said in one.get("differs", {}).items()}
    sections += [robustness_section(extra, differs), _theory_section(extra.get("theory"))]
    sections += [extra["speed"].markdown] if "speed" in extra else []
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


# What became of a claim, as it is counted and as a verdict begins.
STATES = {
    "holds": ("{} hold here", "Holds."),
    "in part": ("{} in part", "Holds in part."),
    "not seen": ("{} were not seen", "Not seen."),
    "open": ("{} are open", "Open."),
}


def _overview(
    claims: Sequence[Mapping[str, Any]], groups: Groups, extra: Mapping[str, Result]
) -> str:
    """A row a claim: what the paper has, what was found here, the verdict."""
    rows = []
    for number, claim in enumerate(claims, start=1):
        if number == 1 or claim["source"] != claims[number - 2]["source"]:
            rows.append([f"**{claim['source']}**", "", "", ""])
        link = f"[{claim['short']}](#{_anchor(_title_of(number, claim))})"
        verdict = STATES[claim["state"]][1].rstrip(".")
        rows.append([link, claim["paper"], _brief(claim, groups, extra), verdict])
    return table(["claim", "in the paper", "here", "verdict"], rows)


def _title_of(number: int, claim: Mapping[str, Any]) -> str:
    return f"{number}. {claim['short']}"


def _anchor(heading: str) -> str:
    """The name of a heading, as GitHub gives it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _brief(claim: Mapping[str, Any], groups: Groups, extra: Mapping[str, Result]) -> str:
    """The claim's figures in a few words: `{0}` in them is its first one, and so on."""
    found = [shown for shown, _ in _shown(claim, groups, extra)]
    needed = [int(name) for _, name, _, _ in string.Formatter().parse(claim["brief"]) if name]
    if not found or not all(found[index] for index in needed):
        return "not run yet"
    told: str = claim["brief"].format(*map(_in_short, found))
    return told


def _in_short(shown: str) -> str:
    """Of `OT: 96.61 ± 0.08 %, 3 seeds` the mean, to a tenth of a point or a hundredth of a nat."""
    digits = 2 if " nats" in shown else 1
    figure = shown.rpartition(": ")[2].partition(", ")[0]
    means = re.sub(r" ± [\d.]+| (%|nats|BLEU)$", "", figure)
    return re.sub(r"\d+\.\d+", lambda one: f"{float(one[0]):.{digits}f}", means)


def _details(
    number: int, claim: Mapping[str, Any], groups: Groups, extra: Mapping[str, Result]
) -> str:
    """What the paper says, what was found here, and what to make of it."""
    shown = _shown(claim, groups, extra)
    found = [figure for figure, _ in shown if figure]
    missing = [asked for _, asked in shown if asked]
    if found and not claim.get("differs"):
        raise ValueError(
            f"figures stand beside {claim['short']!r}; say under `differs` of published.toml "
            "what is not as there"
        )
    where = f" ({claim['where']})" if claim.get("where") else ""
    lines = [f"**{STATES[claim['state']][1]}** {claim['verdict']}", ""]
    lines += [f"* In the paper{where}: {claim['paper']}"]
    lines += [f"* Here: {_joined(found)}"] if found else []
    lines += [f"* Not as in the paper: {claim['differs']}"] if found else []
    lines += [f"* Not run yet: {', '.join(missing)}"] if missing else []
    return f"### {_title_of(number, claim)}\n\n" + "\n".join(lines)


def _joined(found: Sequence[str]) -> str:
    """Figures one after another; the number of seeds once, where all have as many."""
    ends = {one.rpartition(", ")[2] for one in found}
    if len(found) > 1 and len(ends) == 1 and "seed" in (end := ends.pop()):
        return f"{'; '.join(one.rpartition(', ')[0] for one in found)} ({end} each)"
    return "; ".join(found)


def _shown(
    claim: Mapping[str, Any], groups: Groups, extra: Mapping[str, Result]
) -> list[tuple[str, str]]:
    """The figures for a claim in their order; where there is none, what to run."""
    shown = [_here(groups, *one) for one in claim.get("here", [])]
    shown += [_perplexity_here(groups, *one) for one in claim.get("perplexity", [])]
    shown += [_bleu_here(groups, *one) for one in claim.get("bleu", [])]
    shown += [_robust_here(extra, *one) for one in claim.get("robust", [])]
    shown += [_speed_here(extra, *one) for one in claim.get("speed", [])]
    if claim.get("theory"):
        proven = extra.get("theory")
        shown += [(f"{one.what}: {one.shown}", "") for one in proven.targets] if proven else []
        shown += [] if proven else [("", "`python -m benchmarks.papers.theory`")]
    return shown


# Each of these gives a figure, or "", and what to run, or "".


def _here(groups: Groups, what: str, group: str, steps: int | str) -> tuple[str, str]:
    wanted = None if steps == ADAPTIVE else int(steps)
    points = [p for run in groups.get(group, []) if (p := run.at(wanted)) is not None]
    if not points:
        return "", _missing(what, group)
    unit = " %" if points[0].metric == "accuracy" else " nats"
    return f"{what}: {quality(points)}{unit}, {_seeds(points)}", ""


def _perplexity_here(groups: Groups, what: str, group: str) -> tuple[str, str]:
    """Of models without steps."""
    found = [math.exp(run.need(1).value) for run in groups.get(group, [])]
    if not found:
        return "", _missing(what, group)
    return f"{what}: {mean(found, '{:.1f}')}, {_seeds(found)}", ""


def _bleu_here(groups: Groups, what: str, group: str) -> tuple[str, str]:
    """At the most steps."""
    found = [one.bleu[max(one.bleu, key=int)] for one in groups.get(group, []) if one.bleu]
    if not found:
        return "", _missing(what, group)
    return f"{what}: {mean(found, '{:.1f}')} BLEU, {_seeds(found)}", ""


def _robust_here(
    extra: Mapping[str, Result], what: str, group: str, steps: int, disturbance: str, level: str
) -> tuple[str, str]:
    """From tables of benchmarks.robustness: a row for a model at some steps, one column a level."""
    for one in extra.values():
        for found in one.tables:
            if found.caption.startswith(f"{disturbance}{_BY_LEVEL}"):
                for row in _in_units(found).rows:
                    if row[0] == group and row[found.columns.index("steps")] == steps:
                        clean = row[found.columns.index("0")]
                        shown = f"{what}: {clean} to {row[found.columns.index(level)]}"
                        unit = "nats" if disturbance in _IN_NATS else "%"
                        return f"{shown} {unit}, {row[found.columns.index('seeds')]} seeds", ""
    runs = f"--runs RUNS/{group}-[0-9] --steps {steps}"
    kept = f"--name robustness-of-{group} --results benchmarks/papers"
    return "", f"{what} (`python -m benchmarks.robustness {runs} {kept}`)"


def _speed_here(extra: Mapping[str, Result], what: str, model: str, base: str) -> tuple[str, str]:
    """How many times as fast as the base a model is, at each length."""
    if "speed" not in extra:
        return "", f"{what} (`python -m benchmarks.papers.speed`)"
    times = {
        name: [float(ms or 0) for ms in row] for name, _, *row in extra["speed"].tables[0].rows
    }
    pairs = zip(times[base], times[model], strict=True)
    return f"{what}: {' / '.join(f'{slow / fast:.2f}' for slow, fast in pairs)}", ""


def _seeds(found: Sequence[object]) -> str:
    return f"{len(found)} seed{'s' if len(found) > 1 else ''}"


def _missing(what: str, group: str) -> str:
    return f"{what} (`{group}`)"


def render_claims(published: Mapping[str, Any], groups: Groups, kept: Sequence[Result] = ()) -> str:
    """The page of claims and verdicts, paper by paper, and what is not as in the papers."""
    extra = {one.name: one for one in kept}
    claims = published["claim"]
    counted = [
        said.format(count)
        for state, (said, _) in STATES.items()
        if (count := sum(one["state"] == state for one in claims))
    ]
    parts = [_CLAIMS_HEAD, published["claims_note"].strip()]
    parts += ["## Overview", f"Of {len(claims)} claims {', '.join(counted)}."]
    parts += [_overview(claims, groups, extra), published["how_note"].strip()]
    source = ""
    for number, claim in enumerate(claims, start=1):
        if claim["source"] != source:
            source = claim["source"]
            parts += [f"## {source}", published["papers"][source]]
        parts.append(_details(number, claim, groups, extra))
    parts += ["## What is open", published["open_note"].strip()]
    gaps = [[one["what"], one["why"]] for one in published.get("gap", [])]
    if gaps:
        parts += ["## What is not as in the papers, and why", table(["what", "why"], gaps)]
    parts.append(_CLAIMS_END)
    return "\n\n".join(parts) + "\n"


def _theory_section(found: Result | None) -> str:
    if found is None:
        return "## The theorem\n\nNot run yet: `python -m benchmarks.papers.theory`.\n"
    return found.markdown


def robustness_section(extra: Mapping[str, Result], differs: Mapping[str, str]) -> str:
    """Models beside each other on disturbed data: a table for each kind of disturbance."""
    found: dict[tuple[str, tuple[str, ...]], list[Sequence[Cell]]] = {}
    sources = []
    for one in extra.values():
        tables = [kept for kept in one.tables if _BY_LEVEL in kept.caption]
        for kept in tables:
            name = kept.caption.partition(_BY_LEVEL)[0]
            rows = found.setdefault((name, tuple(kept.columns)), [])
            # The paper's are in each.
            rows += [row for row in _in_units(kept).rows if row not in rows]
        if tables:
            sources.append(_provenance_of(one))
    parts = ["## Robustness"]
    if found:
        parts.append(
            "Trained on clean data, measured on disturbed held-out data. Noise is added to the "
            "normalised numbers that a model reads or, where it says `of pixels`, to those from 0 "
            "to 1. Lambda is the recipe's: for MNIST half of the paper's, which halves the cost. "
            "Accuracy in %, loss of characters in nats."
        )
    else:
        parts.append("Not run yet: `python -m benchmarks.robustness --runs RUNS`.")
    for (name, columns), rows in found.items():
        rows.sort(key=_order_of_noise)
        shown = _with_differences(Table("", columns, rows), differs)
        cells = [["–" if cell is None else str(cell) for cell in row] for row in shown.rows]
        parts += [f"{name[:1].upper()}{name[1:]}{_BY_LEVEL}:", table(shown.columns, cells)]
    return "\n\n".join([*parts, *sources]) + "\n"


_BY_LEVEL = ", by its level"  # in the captions of benchmarks.robustness
_IN_NATS = ("characters", "characters, inputs only")  # disturbances; accuracy is of the others


def _in_units(found: Table) -> Table:
    """Accuracy in %, as on the rest of the page; benchmarks.robustness keeps shares."""
    if found.caption.partition(_BY_LEVEL)[0] in _IN_NATS:
        return found
    levels = found.columns.index("seeds") + 1
    rows = [[*row[:levels], *map(_in_percent, row[levels:])] for row in found.rows]
    return dataclasses.replace(found, rows=rows)


def _in_percent(cell: Cell) -> Cell:
    """`0.9661 ± 0.0008` as `96.61 ± 0.08`."""
    if cell is None:
        return None
    return " ± ".join(f"{100 * float(part):.2f}" for part in str(cell).split(" ± "))


def _order_of_noise(row: Sequence[Cell]) -> int:
    """The OT models first, and the paper's figures last."""
    if str(row[0]).startswith("paper, "):
        return 3
    return {"lambda 0": 1, "discrete": 2}.get(str(row[1]), 0)


def _with_differences(found: Table, differs: Mapping[str, str]) -> Table:
    """With what each model has not as in the paper, where the paper's figures are in the table."""
    papers = [str(row[0]).startswith("paper, ") for row in found.rows]
    if not any(papers):
        return found
    rows = [
        [*row, None if of_paper else differs[str(row[0])]]
        for row, of_paper in zip(found.rows, papers, strict=True)
    ]
    return dataclasses.replace(found, columns=(*found.columns, "not as in the paper"), rows=rows)


def _quality_table(present: list[tuple[str, list[Measured]]], differs: Mapping[str, str]) -> str:
    points = [p for _, runs in present for run in runs for p in run.points]
    counts: list[int | None] = [*sorted({p.steps for p in points if p.steps})]
    counts += [None] if any(p.steps is None for p in points) else []
    header = ["measured here", "seeds", "parameters", "evaluations", "CPU s"]
    header += [ADAPTIVE if count is None else _count_name(count) for count in counts]
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
    """How straight the paths are at full steps, of the models that are trained for several."""
    header = ["paths, at full steps", "transport cost", "straightness gap"]
    header += ["lambda / T L², with the mean for the sum"]
    header += [f"jump after {k} agrees with full" for k in (1, 2, 4)]
    rows = []
    for name, runs in present:
        fulls = [run.full for run in runs]
        if all(full.steps == 1 for full in fulls):
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
    """Quality by velocity evaluations, of the runs that were measured with several methods."""
    several = [run for run in runs if len({point.method for point in run.points}) > 1]
    if not several:
        return ""
    spent = sorted({int(point.nfe) for point in several[0].points})
    rows = []
    for method in dict.fromkeys(point.method for point in several[0].points):
        cells = [method]
        for nfe in spent:
            found = [
                p for run in several for p in run.points if p.method == method and p.nfe == nfe
            ]
            cells.append(quality(found) if len(found) == len(several) else "–")
        rows.append(cells)
    seeds = f" ({_seeds(several)} of {len(runs)})" if len(several) < len(runs) else ""
    return table([f"{name}, by evaluations{seeds}", *map(str, spent)], rows)


def _pictures(name: str, present: list[tuple[str, list[Measured]]]) -> str:
    groups, shown = dict(present), []
    if _has_steps(groups):
        shown.append(f"![{name}: quality against steps](plots/{name}-steps.png)")
    if _has_curves(groups):
        shown.append(f"![{name}: training](plots/{name}-training.png)")
    return "\n".join(shown)


def _has_steps(groups: AnyGroups) -> bool:
    """Whether any model has more than one step count: level lines alone show nothing."""
    return any(
        len({point.steps for run in runs for point in run.points if point.steps}) > 1
        for runs in groups.values()
    )


def _has_curves(groups: AnyGroups) -> bool:
    return any(run.curve for runs in groups.values() for run in runs)


def _draw(experiment: dict[str, Any], groups: Groups) -> None:
    present = {name: groups[name] for name in experiment["runs"] if name in groups}
    if _has_steps(present):
        draw_quality(experiment["title"], present, PICTURES / f"{experiment['id']}-steps.png")
    if _has_curves(present):
        draw_curves(experiment["title"], present, PICTURES / f"{experiment['id']}-training.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
