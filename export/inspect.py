"""`stepdial inspect`: a bundle's step counts and what they give, or two bundles compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from serve.bundle import (
    Bundle,
    Calibration,
    ImageInput,
    Latency,
    Manifest,
    Metric,
    PointsInput,
    Quality,
    Rung,
    steps_in_words,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox


# A model's depth, input and cost in words, for the model card and for `inspect`.


# Differences too small to matter: in nats, or as a share of rows or positions.
TOLERATED: dict[str, float] = {"loss": 0.01, "accuracy": 0.005}


def depth_in_words(manifest: Manifest) -> str:
    if manifest.depth == "fixed":
        return (
            "A transformer of fixed depth: its weights differ by depth, so it has one operating "
            "point and no step count to choose."
        )
    if manifest.depth == "chain":
        return (
            f"A chain of ODEs x' = f(x, t), one a block, each over [0, {manifest.T:g}], solved "
            f"with {manifest.method} in as many steps as are asked for."
        )
    if manifest.step is not None and manifest.step.endings:
        return (
            "An OT-Transformer: depth is the ODE x' = f(x, t), solved with "
            f"{manifest.method} in steps of {manifest.step_size(1):g}; the steps share their "
            "weights, and each further one has a correction of its own. The dial is time: fewer "
            "steps end earlier, with a step that is corrected once more."
        )
    if manifest.dial == "time":
        return (
            "An OT-Transformer: depth is the ODE x' = f(x), solved with "
            f"{manifest.method} in steps of {manifest.step_size(1):g}; the dial is time, so that "
            "fewer steps end earlier, and one set of weights serves every step count."
        )
    return (
        f"An OT-Transformer: depth is the ODE x' = f(x) over [0, {manifest.T:g}], solved with "
        f"{manifest.method}; one set of weights serves every step count."
    )


def shape_in_words(manifest: Manifest) -> str:
    layers = manifest.shape.layers
    return f"{layers} block{'' if layers == 1 else 's'} of width {manifest.shape.width}"


def solved_in_words(manifest: Manifest) -> str:
    if manifest.depth == "fixed":
        return "fixed depth"
    return f"{manifest.method}{', one ODE a block' if manifest.depth == 'chain' else ''}"


def input_in_words(manifest: Manifest) -> str:
    match manifest.input:
        case ImageInput(channels=channels, height=height, width=width):
            return f"images of {channels} × {height} × {width}"
        case PointsInput(max_points=most, dimensions=dimensions):
            return f"at most {most} points of {dimensions} coordinates"
        case text if manifest.target_max_tokens is not None:
            return f"at most {text.max_tokens} tokens in, {manifest.target_max_tokens} out"
        case text if text.exact:
            return f"exactly {text.max_tokens} tokens"
        case text:
            return f"at most {text.max_tokens} tokens"


def unit_of_cost(manifest: Manifest) -> str:
    """What one measured latency is for."""
    return "request" if manifest.labelled else "token"


def dial_in_words(manifest: Manifest) -> str:
    """Which step counts a request can ask for, and which go beyond the training."""
    *others, last = map(str, manifest.steps)
    counts = f"{', '.join(others)} or {last} steps" if others else steps_in_words(manifest.steps[0])
    offered = f"a request can ask for {counts}; for others, export again with --steps"
    if manifest.dial == "resolution":
        return offered
    beyond = [steps for steps in manifest.steps if steps > (manifest.grid_steps or 0)]
    measured = f", measured up to {beyond[-1]}" if beyond else ""
    return f"{offered}; trained to {steps_in_words(manifest.grid_steps or 0)}{measured}"


def range_in_words(manifest: Manifest) -> str | None:
    """What the dial buys; None where it was not measured."""
    found = manifest.range
    if found is None:
        return None
    metric = manifest.rungs[0].quality.metric
    scale, unit = (1.0, "nats a token") if metric == "loss" else (100.0, f"points of {metric}")
    places = 4 if metric == "loss" else 2
    value, low, high = (
        f"{scale * each:.{places}f}" for each in (found.value, found.low, found.high)
    )
    first, last = steps_in_words(manifest.steps[0]), steps_in_words(manifest.steps[-1])
    said = (
        f"{last} are better than {first} by {value} {unit}"
        if found.low > 0
        else f"{last} are not shown to be better than {first}: a difference of {value} {unit}"
    )
    return f"range: {said} (95 % interval {low} to {high}, row by row on the same data)"


def flat_in_words(manifest: Manifest) -> str | None:
    """That the fewest steps are enough, where it is shown that the most are not much better."""
    first, last = manifest.steps[0], manifest.steps[-1]
    metric = manifest.rungs[0].quality.metric
    if first == last or manifest.default_steps != first or metric not in TOLERATED:
        return None
    if manifest.range is None or manifest.range.high > TOLERATED[metric]:
        return None  # too few rows to say
    values = [(-1 if metric == "loss" else 1) * rung.quality.value for rung in manifest.rungs]
    if max(values) > values[0] + TOLERATED[metric]:
        return None  # some between are
    enough = "one step" if first == 1 else steps_in_words(first)
    by = "0.01 nats a token" if metric == "loss" else "half a point"
    return f"This model needs {enough}: up to {last}, no more are better by {by}."


def plain_in_words(manifest: Manifest, plain: Sequence[Manifest]) -> list[str]:
    """Which plain models the rungs are as good as, and how large those are."""
    loss = manifest.rungs[0].quality.metric == "loss"

    def shown(rung: Rung) -> str:
        value = rung.quality.value
        return f"{value:.4f} nats a token" if loss else f"{100 * value:.2f} %"

    def as_good(one: Manifest, rung: Rung) -> bool:
        theirs, ours = one.rungs[-1].quality.value, rung.quality.value
        return theirs <= ours if loss else theirs >= ours

    lines = []
    for one in sorted(plain, key=lambda each: each.shape.parameters):
        reached = [rung for rung in manifest.rungs if as_good(one, rung)]
        best = max(reached, key=lambda rung: rung.steps, default=None)
        beside = (
            f"as good as {steps_in_words(best.steps)} ({shown(best)})"
            if best is not None
            else f"worse than {steps_in_words(manifest.steps[0])} ({shown(manifest.rungs[0])})"
        )
        size, value = one.shape.parameters, shown(one.rungs[-1])
        lines.append(f"plain: {one.name} has {size:,} parameters and {value}, {beside}")
    last, ours = manifest.rungs[-1], manifest.shape.parameters
    good = [one.shape.parameters for one in plain if as_good(one, last)]
    size = min(good) if good else max(one.shape.parameters for one in plain)
    lines.append(
        f"plain: {'' if good else 'none of up to '}{size:,} parameters, {size / ours:.2g} times as "
        f"many as here, {'are' if good else 'is'} as good as {steps_in_words(last.steps)} "
        f"({shown(last)})"
    )
    return lines


def check_plain(manifest: Manifest, plain: Sequence[Manifest]) -> None:
    """ValueError if one of them cannot be compared."""
    for one in plain:
        problem = not_comparable(manifest, one)
        if problem is not None:
            raise ValueError(f"{one.name} is not comparable: {problem}")


def metric_in_words(metric: Metric) -> str:
    return "loss (nats a token)" if metric == "loss" else metric


LOG_SPAN = 4.0  # a wider axis than this is logarithmic
LABEL_OFFSETS = ((5, 5), (5, -13))  # points: above the line of one bundle, below that of another
# Without the date, the same bundle gives the same file.
UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def rung_latency_ms(bundle: Bundle, rung: Rung) -> float | None:
    """One row's median: a classification of the middle length, or one decoded token."""
    entry = _typical(bundle.latency, rung.steps)
    return None if entry is None else entry[0]


def size_mb(manifest: Manifest) -> float:
    """Of all files that a sealed bundle lists."""
    return sum(entry.bytes for entry in manifest.files.values()) / 1e6


def labels_of(bundles: Sequence[Bundle]) -> list[str]:
    """What to call each bundle: its name, or its folder where they share a name."""
    names = [bundle.manifest.name for bundle in bundles]
    if len(set(names)) == len(names):
        return names
    return [str(bundle.folder) for bundle in bundles]


def describe(bundle: Bundle, plain: Sequence[Manifest] = ()) -> str:
    m = bundle.manifest
    step = "graphs of one step and of each step count" if m.step else "a graph of each step count"
    lines = [
        f"{m.name}: {m.card.get('title', '')}".rstrip(": "),
        f"  {m.task}, {m.shape.parameters:,} parameters, {shape_in_words(m)}, "
        f"{input_in_words(m)}, {solved_in_words(m)}",
        f"  {m.precision_in_words}, {step}, {size_mb(m):.1f} MB",
    ]
    if m.card.get("precision"):
        lines.append(f"  {m.precision}: {m.card['precision']}")
    if m.labels:
        lines.append(f"  labels: {', '.join(m.labels)}")
    if m.depth == "ode":
        lines.append(f"  {dial_in_words(m)}")
    lines += _ladder(bundle)
    lines += [f"  {said}" for said in (range_in_words(m), flat_in_words(m)) if said is not None]
    lines += [f"  {said}" for said in (plain_in_words(m, plain) if plain else ())]
    if m.labels and all(rung.quality.low <= 1 / len(m.labels) for rung in m.rungs):
        lines.append(
            "  WARNING: at chance: no step count is shown to be better than guessing one of "
            f"{len(m.labels)} labels"
        )
    if m.calibration is not None:
        lines += _early_answers(m.calibration, m.rungs[-1].nfe)
    elif m.labelled:
        lines.append("  max_disagreement: not measured, so requests with it are refused")
    if bundle.latency is None:
        lines.append("  no latency.json: measure this machine with `stepdial calibrate BUNDLE`")
    else:
        machine = bundle.latency.machine
        lines.append(
            f"  latency: {_typical_length(bundle)}{machine.cpu}, {machine.threads} of "
            f"{machine.cores} cores, {machine.runtime}, {bundle.latency.measured_at}"
        )
    return "\n".join(lines)


def draw(bundles: Sequence[Bundle], paths: Sequence[Path]) -> None:
    """Quality against latency, one line a bundle, each rung a labelled point with its interval.

    Against velocity evaluations where a latency is missing. Same bundles, same bytes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = all(
        rung_latency_ms(bundle, rung) is not None
        for bundle in bundles
        for rung in bundle.manifest.rungs
    )
    manifest = bundles[0].manifest
    metric = manifest.rungs[0].quality.metric
    with matplotlib.rc_context({"svg.hashsalt": "stepdial"}):
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
        curves = [_points(bundle, timed) for bundle in bundles]
        notes = [note for index, curve in enumerate(curves) for note in _curve(axes, curve, index)]
        _scale(axes, [point.cost for curve in curves for point in curve])
        axes.set_xlabel(
            f"latency, ms a {unit_of_cost(manifest)} (median, one row)"
            if timed
            else "velocity evaluations"
        )
        lower = ", lower is better" if metric == "loss" else ""
        axes.set_ylabel(metric_in_words(metric) + lower)
        if metric == "loss":
            axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        legend = "labels: steps"
        if any(not point.kept for curve in curves for point in curve):
            legend += "; hollow: fewer steps are at least as good"
        axes.set_title(legend, fontsize="small", loc="left")
        for index, label in enumerate(labels_of(bundles)):
            axes.plot([], [], marker="o", color=f"C{index}", label=label)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        _part_labels(figure, notes)
        for path in paths:
            figure.savefig(path, dpi=150, metadata=UNDATED.get(path.suffix))
        pyplot.close(figure)


class _Point(NamedTuple):
    cost: float
    steps: int
    quality: Quality
    kept: bool  # on the frontier


def _points(bundle: Bundle, timed: bool) -> list[_Point]:
    return [
        _Point(
            (rung_latency_ms(bundle, rung) or 0.0) if timed else rung.nfe,
            rung.steps,
            rung.quality,
            not rung.dominated,
        )
        for rung in bundle.manifest.rungs
    ]


def _curve(axes: "Axes", points: list[_Point], index: int) -> "list[Annotation]":
    """One bundle: intervals of all rungs, a line through its frontier; the labels."""
    from matplotlib.patheffects import withStroke

    colour = f"C{index}"
    for point in points:
        q = point.quality
        axes.errorbar(
            [point.cost],
            [q.value],
            yerr=[[q.value - q.low], [q.high - q.value]],
            marker="o",
            capsize=3,
            color=colour,
            elinewidth=1,
            markerfacecolor=colour if point.kept else "white",
        )
    kept = [point for point in points if point.kept]
    axes.plot([point.cost for point in kept], [point.quality.value for point in kept], color=colour)
    return [
        axes.annotate(
            f"{point.steps}",
            (point.cost, point.quality.value),
            textcoords="offset points",
            xytext=LABEL_OFFSETS[index % len(LABEL_OFFSETS)],
            color=colour,
            path_effects=[withStroke(linewidth=3, foreground="white")],  # readable on a line
        )
        for point in points
    ]


def _scale(axes: "Axes", costs: list[float]) -> None:
    """Logarithmic where costs are far apart, with ticks that read as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if not 0 < LOG_SPAN * min(costs) < max(costs):
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _part_labels(figure: "Figure", notes: "list[Annotation]") -> None:
    """Hide a label that would stand on an earlier one."""
    figure.draw_without_rendering()  # where things are is known from here on
    shown: list[Bbox] = []
    for note in notes:
        box = note.get_window_extent()
        if any(box.overlaps(other) for other in shown):
            note.set_visible(False)
        else:
            shown.append(box)


def _ladder(bundle: Bundle) -> list[str]:
    m = bundle.manifest
    beside = "" if not m.rounds else "as fp32    change "
    metric = m.rungs[0].quality.metric
    wholes = any(rung.quality.exact is not None for rung in m.rungs)
    whole = f"{'all right':>9} " if wholes else ""
    lines = [
        f"  {'steps':>5} {'effort':<7} {'nfe':>4} {metric:>9}  {'95 % interval':<16} "
        f"{whole}{beside}{'ms a ' + unit_of_cost(m):>12} {'max error':>9} {'tolerance':>9}"
        "  frontier"
    ]
    for rung in m.rungs:
        latency = rung_latency_ms(bundle, rung)
        shown = "not measured" if latency is None else f"{latency:.2f}"
        q, v, against = rung.quality, rung.verified, rung.against_fp32
        beside = ""
        if against is not None:
            beside = f"{100 * against.top1_agreement:6.2f}% {against.change:>+9.4f} "
        whole = f"{100 * (q.exact or 0):>7.2f} % " if wholes else ""
        frontier = "-" if rung.dominated else "yes"
        mark = " *" if rung.steps == m.default_steps else ""
        lines.append(
            f"  {rung.steps:>5} {rung.effort or '-':<7} {rung.nfe:>4} {q.value:>9.4f}  "
            f"{f'{q.low:.4f} to {q.high:.4f}':<16} {whole}{beside}{shown:>12} "
            f"{v.max_abs_error:>9.1e} {v.tolerance:>9.1e}  {frontier}{mark}"
        )
    lines.append("  * the default; frontier: no smaller step count is as good")
    return lines


def _early_answers(calibration: Calibration, full: int) -> list[str]:
    lines = [
        "  early answers, by the max_disagreement of a request (shares of answers that differ "
        "from the full one):",
        f"  {'allowed':>9} {'observed':>9} {f'nfe of {full}':>10} {'threshold':>10}",
    ]
    for level in calibration.levels:
        threshold = "all steps" if level.threshold is None else f"{level.threshold:.3f}"
        lines.append(
            f"  {100 * level.max_disagreement:>7g} % {100 * level.observed:>7.2f} % "
            f"{level.evaluations:>10.2f} {threshold:>10}"
        )
    lines.append(
        f"  each certified with {100 * calibration.confidence:g} % confidence on "
        f"{calibration.rows:,} {calibration.source}"
    )
    return lines


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


def _typical_length(bundle: Bundle) -> str:
    """How long the input was whose time is shown, where inputs differ in length."""
    found = _typical(bundle.latency, bundle.manifest.steps[0])
    match bundle.manifest.input:
        case ImageInput() | PointsInput():
            return ""
        case _:
            return "" if found is None else f"at {found[1]} tokens, "


# `stepdial inspect A B`: two bundles side by side, rung by rung.


def compared(a: Bundle, b: Bundle) -> str:
    """The facts of both, and if they measure the same thing, their rungs of as many steps."""
    lines = [f"{mark}: {label}" for mark, label in zip("AB", labels_of([a, b]), strict=True)]
    lines += _facts(a.manifest, b.manifest)
    problem = not_comparable(a.manifest, b.manifest)
    if problem is not None:
        return "\n".join([*lines, f"not comparable: {problem}"])
    return "\n".join([*lines, *_rungs(a, b)])


def not_comparable(a: Manifest, b: Manifest) -> str | None:
    """Why a difference of their qualities would mean nothing, if it would not."""
    metrics = [m.rungs[0].quality.metric for m in (a, b)]
    if a.task != b.task:
        return f"the task of A is {a.task}, that of B {b.task}"
    if metrics[0] != metrics[1]:
        return f"the quality of A is its {metrics[0]}, that of B its {metrics[1]}"
    if a.labels != b.labels:
        return "they tell different classes apart"
    if metrics[0] == "loss" and _vocabulary(a) != _vocabulary(b):
        return "their tokenizers differ, and with them what the loss of a token means"
    return None


def _vocabulary(manifest: Manifest) -> str | None:
    tokenizer = manifest.tokenizer
    return None if tokenizer is None else manifest.files[tokenizer.file].sha256


def _facts(a: Manifest, b: Manifest) -> list[str]:
    sizes = (size_mb(a), size_mb(b))
    facts: Sequence[tuple[str, str, str]] = (
        ("", "A", "B"),
        ("task", a.task, b.task),
        ("precision", a.precision_in_words, b.precision_in_words),
        ("size", f"{sizes[0]:.1f} MB", f"{sizes[1]:.1f} MB, {sizes[1] / sizes[0]:.2f} of A"),
        ("parameters", f"{a.shape.parameters:,}", f"{b.shape.parameters:,}"),
        ("shape", shape_in_words(a), shape_in_words(b)),
        ("input", input_in_words(a), input_in_words(b)),
        ("solved", solved_in_words(a), solved_in_words(b)),
        ("default steps", str(a.default_steps), str(b.default_steps)),
    )
    wide = max(len(first) for _, first, _ in facts)
    return [f"  {name:<13}  {first:<{wide}}  {second}".rstrip() for name, first, second in facts]


def _rungs(a: Bundle, b: Bundle) -> list[str]:
    metric, unit = a.manifest.rungs[0].quality.metric, unit_of_cost(a.manifest)
    better = "lower" if metric == "loss" else "higher"
    ladders = [{rung.steps: rung for rung in bundle.manifest.rungs} for bundle in (a, b)]
    lines = [
        f"  {metric} ({better} is better) and ms a {unit} (one row), by steps",
        f"  {'steps':>5} {'A':>9} {'B':>9} {'B - A':>9}  {'95 % intervals':<14} "
        f"{'A ms':>8} {'B ms':>8} {'B / A':>6}",
    ]
    for steps in sorted({*ladders[0], *ladders[1]}):
        one, other = ladders[0].get(steps), ladders[1].get(steps)
        lines.append(f"  {steps:>5} {_qualities(one, other)} {_latencies(a, one, b, other)}")
    lines.append(
        "  intervals that overlap leave open which is better; on the same rows, even a smaller "
        "difference can be real"
    )
    if a.latency and b.latency and a.latency.machine != b.latency.machine:
        lines.append(
            "  the latencies are of different machines, threads or runtimes: measure both here "
            "with `stepdial calibrate`"
        )
    return lines


def _qualities(a: Rung | None, b: Rung | None) -> str:
    shown = ["-" if rung is None else f"{rung.quality.value:.4f}" for rung in (a, b)]
    difference, note = "-", "-"
    if a is not None and b is not None:
        difference = f"{b.quality.value - a.quality.value:+.4f}"
        note = "overlap" if _overlap(a.quality, b.quality) else "apart"
    return f"{shown[0]:>9} {shown[1]:>9} {difference:>9}  {note:<14}"


def _overlap(a: Quality, b: Quality) -> bool:
    return a.low <= b.high and b.low <= a.high


def _latencies(a: Bundle, one: Rung | None, b: Bundle, other: Rung | None) -> str:
    first = None if one is None else rung_latency_ms(a, one)
    second = None if other is None else rung_latency_ms(b, other)
    shown = ["-" if ms is None else f"{ms:.2f}" for ms in (first, second)]
    ratio = f"{second / first:.2f}" if first and second is not None else "-"
    return f"{shown[0]:>8} {shown[1]:>8} {ratio:>6}"
