"""The section of the results page on the honest question: one model for every step count, a model
for each, or none of it?

Knows measured runs and what is compared with what; not how anything was trained.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.papers.measured import Measured
from benchmarks.papers.tables import figures, quality, table

Groups = Mapping[str, Sequence[Measured]]
_TITLE = "One model for every step count, or one for each"


def frontier_section(section: Mapping[str, Any], groups: Groups) -> str:
    """The section, with a table for each comparison of which everything has been measured."""
    parts = [f"## {_TITLE}", section["note"].strip()]
    for one in section["compared"]:
        needed = [one["any"], *one["fixed"].values(), one["discrete"]]
        absent = ", ".join(f"`{name}`" for name in needed if name not in groups)
        what = one["what"]
        parts.append(f"{what}: not run yet: {absent}." if absent else _table(one, groups))
    return "\n\n".join(parts) + "\n"


def _table(one: Mapping[str, Any], groups: Groups) -> str:
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
