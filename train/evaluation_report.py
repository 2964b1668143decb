"""The report of `stepdial evaluate RUN`: table, plot and JSON."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time it would load torch, which a report does not need
    from train.evaluate import Range, Report, Row


def print_report(report: "Report") -> None:
    """The quality of each count, one table a method; `--json` has the measures of the paths too."""
    metric = report.rows[0].quality.metric
    solver = any(row.steps is None for row in report.rows)
    whole = "the adaptive solver" if solver else "all steps"
    for method in dict.fromkeys(row.method for row in report.rows):
        solved = "" if report.discrete else f", {method}"
        print(f"{report.name}{solved}, {report.measured}")
        loss = "" if metric == "loss" else f" {'loss':>7}"
        print(f"{'steps':>5} {'nfe':>5} {metric:>9}  {'95 % interval':<19}{loss} {'as full':>8}")
        for row in (row for row in report.rows if row.method == method):
            print(_line(row))
        print(f"as full: the share of answers that are those of {whole}")
        f1s = [row.quality.macro_f1 for row in report.rows if row.method == method]
        if None not in f1s:
            print(f"macro F1: {' / '.join(f'{one:.4f}' for one in f1s)}")
        if any(row.quality.whole is not None for row in report.rows):
            print(f"right in all positions: {_whole(report, method)}")
        if method in report.ranges:
            print(_range_in_words(report.ranges[method]))
        shares = report.jumps.get(method, {})
        if shares:
            spent, same = " / ".join(map(str, shares)), " / ".join(map(_percent, shares.values()))
            print(
                f"jump after {spent} of {report.full_steps} step{'s' * (report.full_steps > 1)}: "
                f"{same} of answers are those of {whole}"
            )
        print()
    if report.chance is not None and all(row.quality.low <= report.chance for row in report.rows):
        print(
            f"WARNING: at chance: always answering the most frequent class is right in "
            f"{_percent(report.chance)}\nof the rows, and no step count is shown to be better\n"
        )
    if report.lengths:
        print("evaluations of the adaptive solver against sequence length")
        print(f"{'length':>6} {'rows':>7} {'nfe':>6}")
        for spent_on in report.lengths:
            print(f"{spent_on.length:>6} {spent_on.rows:>7} {spent_on.nfe:>6.1f}")
        print()


def _whole(report: "Report", method: str) -> str:
    """The share of rows without a wrong answer, at each count."""
    shares = [row.quality.whole for row in report.rows if row.method == method]
    return " / ".join(_percent(share) for share in shares if share is not None)


def _range_in_words(found: "Range") -> str:
    if not math.isfinite(found.gain.half):
        return "one row was measured: too few to tell step counts apart"
    shown = f"{found.gain.better:.4f} ± {found.gain.half:.4f}"
    steps = f"{found.first} step" + "s" * (found.first > 1)
    if not found.gain.real:
        enough = "is enough" if found.first == 1 else "are enough"
        return f"{steps} {enough} here: no count is better beyond chance ({shown})"
    return f"range: {found.best} steps are better than {steps} by {shown}"


def _line(row: "Row") -> str:
    q = row.quality
    interval = f"{q.low:.4f} to {q.high:.4f}"
    steps = "-" if row.steps is None else str(row.steps)
    loss = "" if q.metric == "loss" else f" {q.loss:>7.4f}"
    return (
        f"{steps:>5} {row.nfe:>5g} {q.value:>9.4f}  {interval:<19}{loss} "
        f"{_percent(row.agreement):>8}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def check_file(path: Path) -> None:
    """Before the work, not after it: whether a file can be written there."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name another file")


def check_plot(path: Path) -> None:
    """The same for a picture."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: a plot is a .png, .svg or .pdf")
    check_file(path)


def write_json(report: "Report", path: Path) -> None:
    """With null for the ends of an interval that one row does not have."""
    plain = _finite(dataclasses.asdict(report))
    path.write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_quality(report: "Report", path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metric = report.rows[0].quality.metric
    stepped = [row for row in report.rows if row.steps is not None]
    methods = list(dict.fromkeys(row.method for row in stepped))
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for method in methods:
        rows = [row for row in stepped if row.method == method]
        axes.errorbar(
            [_place(row, methods) for row in rows],
            [row.quality.value for row in rows],
            yerr=[
                [row.quality.value - row.quality.low for row in rows],
                [row.quality.high - row.quality.value for row in rows],
            ],
            marker="o",
            capsize=3,
            color="#0b6e6e" if len(methods) == 1 else None,
            label=method,
        )
    ticks = sorted({_place(row, methods) for row in stepped})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("steps" if len(methods) == 1 else "velocity evaluations")
    axes.set_ylabel("loss (nats per token)" if metric == "loss" else metric)
    axes.set_title(f"{report.name}: quality against steps (95 % intervals)")
    axes.spines[["top", "right"]].set_visible(False)
    if len(methods) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _place(row: "Row", methods: list[str]) -> float:
    """Methods are compared by what they cost, a method with itself by its steps."""
    return float(row.steps or 0) if len(methods) == 1 else row.nfe
