"""`stepdial inspect A B`: two bundles side by side, rung by rung.

Reads what was measured of each; measures nothing, so it knows quality only with its interval, not
row by row.
"""

from collections.abc import Sequence

from export.frontier import labels_of, rung_latency_ms, size_mb
from export.words import input_in_words, shape_in_words, solved_in_words, unit_of_cost
from serve.bundle import Bundle, Manifest, Quality, Rung


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
