"""The pictures of the results page: quality against steps, and training curves.

Knows measured runs, not where they came from.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.measured import Measured

Groups = Mapping[str, Sequence[Measured]]


def draw_quality(title: str, groups: Groups, path: Path) -> None:
    """One line a group; models of one depth are level lines."""
    figure, axes = _canvas(title)
    metric = "loss"
    for name, runs in groups.items():
        metric = runs[0].points[0].metric
        counts = sorted({p.steps for run in runs for p in run.points if p.steps})
        means = []
        for count in counts:
            found = [point.value for run in runs if (point := run.at(count)) is not None]
            means.append(statistics.mean(found))
        if len(counts) == 1:
            axes.axhline(means[0], linestyle="--", linewidth=1, label=name, color=_grey(name))
        else:
            axes.plot(counts, means, marker="o", markersize=4, label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("steps")
    axes.set_ylabel("loss (nats a token)" if metric == "loss" else metric)
    _finish(figure, axes, path)


def draw_curves(title: str, groups: Groups, path: Path) -> None:
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
    axes.set_xlabel("velocity evaluations spent in training")
    axes.set_ylabel(f"validation {label.partition('@')[0]}, full steps")
    _finish(figure, axes, path)


def _steps(label: str) -> int:
    """Of `accuracy@8`, 8; a solver that chooses its own steps goes last."""
    steps = label.partition("@")[2]
    return int(steps) if steps.isdigit() else 0


def _canvas(title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _grey(name: str) -> str:
    return f"{0.2 + 0.5 * (sum(name.encode()) % 7) / 7:.2f}"


def _finish(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
