"""Quality against steps: the table and the picture of `stepdial evaluate`.

Uses the held-out split of the run's own data; knows nothing of bundles.
"""

import dataclasses
from pathlib import Path

from train.checkpoint import load_run
from train.data import open_dataset
from train.ode import method_named
from train.quality import Quality, measure_model

Rows = dict[int, Quality]


def evaluate_run(folder: Path, steps: list[int], method: str, data: str = "") -> Rows:
    model, recipe, tokenizer, _ = load_run(folder)
    method_named(method)
    if data:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path=data))
    dataset = open_dataset(recipe, tokenizer)
    labelled = dataset.labels is not None
    counts = [1] if model.discrete else steps
    size = max(8, 8192 // recipe.model.window)
    return {m: measure_model(model, dataset.held_out(size), labelled, m, method) for m in counts}


def print_quality(name: str, method: str, rows: Rows) -> None:
    metric = next(iter(rows.values())).metric
    print(f"{name}, {method}, held-out data")
    print(
        f"{'steps':>5} {'nfe':>4} {metric:>9}  {'95 % interval':<19} {'loss':>7} {'transport':>9}"
    )
    for steps, q in rows.items():
        nfe = steps * method_named(method).evaluations
        interval = f"{q.low:.4f} to {q.high:.4f}"
        print(f"{steps:>5} {nfe:>4} {q.value:>9.4f}  {interval:<19} {q.loss:>7.4f} {q.cost:>9.4f}")


def check_plot(path: Path) -> None:
    """Before the work, not after it: whether a picture can be written there."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: a plot is a .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def plot_quality(name: str, rows: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metric = next(iter(rows.values())).metric
    steps, quality = list(rows), list(rows.values())
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    below = [q.value - q.low for q in quality]
    above = [q.high - q.value for q in quality]
    axes.errorbar(
        steps,
        [q.value for q in quality],
        yerr=[below, above],
        marker="o",
        capsize=3,
        color="#0b6e6e",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [str(s) for s in steps])
    axes.set_xlabel("steps")
    axes.set_ylabel("loss (nats per token)" if metric == "loss" else metric)
    axes.set_title(f"{name}: quality against steps (95 % intervals)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
