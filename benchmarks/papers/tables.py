"""Cells and tables of the results page: means over seeds, the best in bold, what was measured on.

Knows measured runs and Markdown; not what is compared with what.
"""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.lab import Machine
from benchmarks.papers.measured import Measured, Point

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
