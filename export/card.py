"""The model card of a bundle: README.md, written from the manifest alone."""

from export.words import (
    depth_in_words,
    flat_in_words,
    input_in_words,
    metric_in_words,
    range_in_words,
    shape_in_words,
)
from serve.bundle import Manifest, steps_in_words


def model_card(manifest: Manifest) -> str:
    m = manifest
    metric, heads = m.rungs[0].quality.metric, m.shape.heads
    whole = any(rung.quality.exact is not None for rung in m.rungs)
    title = str(m.card.get("title") or m.name)
    lines = [
        f"# {m.name}: {title}",
        "",
        str(m.card.get("description", "")),
        "",
        f"{depth_in_words(m)} {m.shape.parameters:,} parameters, {shape_in_words(m)}, "
        f"{heads} head{'' if heads == 1 else 's'}, {input_in_words(m)}, {m.precision_in_words}.",
        "",
        f"| steps | effort | evaluations | {metric_in_words(metric)} | 95 % interval |"
        f"{' rows all right |' if whole else ''} default |",
        f"|---:|---|---:|---:|---|{'---:|' if whole else ''}---|",
    ]
    for rung in m.rungs:
        q = rung.quality
        default = "yes" if rung.steps == m.default_steps else ""
        lines.append(
            f"| {rung.steps} | {rung.effort or ''} | {rung.nfe} | {_number(metric, q.value)} | "
            f"{_number(metric, q.low)} to {_number(metric, q.high)} | "
            f"{f'{100 * (q.exact or 0):.2f} % | ' if whole else ''}{default} |"
        )
    samples = m.rungs[0].quality.samples
    unit = "tokens" if metric == "loss" else "positions" if m.task == "tag" else "rows"
    lines += ["", f"Measured on {samples:,} held-out {unit}, in the runtime that serves.", ""]
    if (found := range_in_words(m)) is not None:
        lines += [f"{found[0].upper()}{found[1:]}.", ""]
    if (flat := flat_in_words(m)) is not None:
        lines += [flat, ""]
    beyond = [rung.steps for rung in m.rungs if m.grid_steps and rung.steps > m.grid_steps]
    if beyond:
        lines += [
            f"Trained to {steps_in_words(m.grid_steps or 0)}; what {steps_in_words(beyond[-1])} do "
            "was measured like the rest.",
            "",
        ]
    if m.labels:
        lines += [f"Labels: {', '.join(m.labels)}.", ""]
    for key, heading in (
        ("data", "Data"),
        ("baselines", "Measured beside it"),
        ("intended_use", "Intended use"),
        ("precision", "Precision"),
        ("limits", "Limits"),
        ("license", "Licence"),
        ("made_with", "Made with"),
    ):
        if m.card.get(key):
            lines += [f"## {heading}", "", str(m.card[key]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _number(metric: str, value: float) -> str:
    return f"{value:.4f}" if metric == "loss" else f"{100 * value:.2f} %"
