"""The section of the results page that shows a screen: its variants side by side.

Knows what was kept of them; not how they were trained.
"""

from benchmarks.papers.measured import Measured
from benchmarks.papers.screens import Screen
from benchmarks.papers.tables import figures, marked, mean, provenance, table

Groups = dict[str, list[Measured]]


def screen_section(screen: Screen, groups: Groups) -> str:
    """The variants of a screen side by side."""
    found = {one: groups.get(screen.group(one), []) for one in screen.variants}
    present = [(f"`{one.name}`", runs) for one, runs in found.items() if runs]
    absent = [f"`{one.name}`" for one, runs in found.items() if not runs]
    parts = [f"## Any step count: a screen on {screen.title}", _introduction(screen)]
    if present:
        parts += [screen.note.strip(), _quality_table(present), _method_table(present)]
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


def _quality_table(present: list[tuple[str, list[Measured]]]) -> str:
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


def _method_table(present: list[tuple[str, list[Measured]]], nfe: int = 4) -> str:
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
