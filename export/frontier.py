"""`stepdial inspect`: a bundle's ladder as a table, and its quality-latency frontier as a picture.

Reads bundles; measures nothing.
"""

from pathlib import Path

from export.words import input_in_words, metric_in_words, unit_of_cost
from serve.bundle import Bundle, Latency, Manifest, Rung


def rung_latency_ms(bundle: Bundle, rung: Rung) -> float | None:
    """One row's median: a classification of the middle length, or one decoded token."""
    entry = _typical(bundle.latency, rung.steps)
    return None if entry is None else entry[0]


def describe(bundle: Bundle) -> str:
    m = bundle.manifest
    total = sum(entry.bytes for entry in m.files.values())
    unit = unit_of_cost(m)
    lines = [
        f"{m.name}: {m.card.get('title', '')}".rstrip(": "),
        f"  {m.task}, {m.shape.parameters:,} parameters, {m.shape.layers} blocks of width "
        f"{m.shape.width}, {input_in_words(m)}, {m.precision}, {_solved(m)}, "
        f"{total / 1e6:.1f} MB",
    ]
    if m.labels:
        lines.append(f"  labels: {', '.join(m.labels)}")
    metric = m.rungs[0].quality.metric
    lines.append(
        f"  {'steps':>5} {'effort':<7} {'nfe':>4} {metric:>9}  {'95 % interval':<18} "
        f"{'ms a ' + unit:>12} {'max error':>10} {'tolerance':>10}"
    )
    for rung in m.rungs:
        latency = rung_latency_ms(bundle, rung)
        shown = "not measured" if latency is None else f"{latency:.2f}"
        q, v = rung.quality, rung.verified
        mark = " *" if rung.steps == m.default_steps else ""
        lines.append(
            f"  {rung.steps:>5} {rung.effort or '-':<7} {rung.nfe:>4} {q.value:>9.4f}  "
            f"{q.low:.4f} to {q.high:.4f}   {shown:>12} {v.max_abs_error:>10.1e} "
            f"{v.tolerance:>10.1e}{mark}"
        )
    lines.append("  * the rung of a request that names none")
    if bundle.latency is None:
        lines.append("  no latency.json: measure this machine with `stepdial calibrate BUNDLE`")
    else:
        machine = bundle.latency.machine
        lines.append(
            f"  latency: {machine.cpu}, {machine.threads} of {machine.cores} cores, "
            f"{machine.runtime}, {bundle.latency.measured_at}"
        )
    return "\n".join(lines)


def draw(bundles: list[Bundle], path: Path) -> None:
    """Quality against latency, one line a bundle, each rung a labelled point with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    metric = bundles[0].manifest.rungs[0].quality.metric
    for index, bundle in enumerate(bundles):
        points = [
            (latency, rung)
            for rung in bundle.manifest.rungs
            if (latency := rung_latency_ms(bundle, rung)) is not None
        ]
        if not points:
            continue
        x = [latency for latency, _ in points]
        quality = [rung.quality for _, rung in points]
        below = [q.value - q.low for q in quality]
        above = [q.high - q.value for q in quality]
        colour = f"C{index}"
        axes.errorbar(
            x,
            [q.value for q in quality],
            yerr=[below, above],
            marker="o",
            capsize=3,
            color=colour,
            label=bundle.manifest.name,
        )
        for latency, rung in points:
            axes.annotate(
                f"{rung.steps}",
                (latency, rung.quality.value),
                textcoords="offset points",
                xytext=(6, 6),
                color=colour,
            )
    axes.set_xscale("log")
    unit = unit_of_cost(bundles[0].manifest)
    axes.set_xlabel(f"latency, ms a {unit} (median, one row)")
    lower = ", lower is better" if metric == "loss" else ""
    axes.set_ylabel(metric_in_words(metric) + lower)
    if metric == "loss":
        axes.invert_yaxis()
    axes.set_title("quality against latency; labels are steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _solved(manifest: Manifest) -> str:
    if manifest.depth == "fixed":
        return "fixed depth"
    return f"{manifest.method}{', one ODE a block' if manifest.depth == 'chain' else ''}"


def _typical(latency: Latency | None, steps: int) -> tuple[float, int] | None:
    if latency is None:
        return None
    wanted = [
        (entry.median_ms, entry.length)
        for entry in latency.entries
        if entry.steps == steps and entry.batch == 1 and entry.kind in ("classify", "decode")
    ]
    if not wanted:
        return None
    return sorted(wanted, key=lambda pair: pair[1])[len(wanted) // 2]
