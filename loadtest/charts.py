"""What a report shows in pictures: which there are, and what each plots.

It deliberately knows nothing of drawing, which loadtest/drawing.py does, and of pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.objective import parse_objective
from loadtest.report import Report
from loadtest.summary import CURVE, Row

Scale = Literal["linear", "log", "tail"]


@dataclass(frozen=True, slots=True)
class Line:
    """Points that belong together; `of` says which lines share a colour, none being a faint one.

    Without a label, the caption says what it is.
    """

    label: str
    of: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    loose: bool = False  # points only
    spread: Sequence[tuple[float, float]] = ()  # below and above each y
    names: Sequence[str] = ()  # beside each point


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture."""

    title: str
    caption: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    limits: Sequence[tuple[str, float]] = ()  # wanted values of y
    y_from_0: bool = False
    stacked: bool = False  # shares on top of each other at the names of x


def charts(report: Report) -> list[Chart]:
    """All that say something about this test."""
    several = len({stage.rate_per_s for stage in report.stages}) > 1
    found = _against_rate(report) if several else _distribution(report)
    found += [_timeline(report), *_frontier(report), *_steps_used(report)]
    return [chart for chart in found if any(len(line.x) for line in chart.lines)]


def _against_rate(report: Report) -> list[Chart]:
    found = []
    for title, what, low, high in (
        ("Latency against rate", "latency", lambda row: row.p50_ms, lambda row: row.p99_ms),
        (
            "Time to first token against rate",
            "ttft",
            lambda row: row.first_token_p50_ms,
            lambda row: row.first_token_p99_ms,
        ),
        (
            "Time between tokens against rate",
            "itl",
            lambda row: row.gap_p50_ms,
            lambda row: row.gap_p99_ms,
        ),
    ):
        lines = _by_rate(report, low, False) + _by_rate(report, high, True)
        caption = "Solid: half of the requests took no longer; dashed: 99 of 100."
        found.append(
            Chart(
                *(title, caption, "requests a second, offered", "ms", lines),
                y_scale="log",
                limits=_limits(report, what),
            )
        )
    return [*found, _rates(report)]


def _by_rate(report: Report, value: Callable[[Row], float | None], dashed: bool) -> list[Line]:
    points: dict[str, list[tuple[float, float]]] = {}
    for stage in report.stages:
        for row in stage.rows:
            found = value(row)
            if found is not None:
                points.setdefault(_name(row), []).append((stage.offered_per_s, found))
    lines = []
    for name, pairs in points.items():
        pairs.sort()
        x, y = [rate for rate, _ in pairs], [value for _, value in pairs]
        lines.append(Line("" if dashed else name, name, x, y, dashed))
    return lines


def _rates(report: Report) -> Chart:
    """What came in against what came out, of all operations that shared a stage."""
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for stage in report.stages:
        point = (stage.offered_per_s, stage.answered_per_s, stage.good_per_s)
        groups.setdefault(stage.only or "all", []).append(point)
    rates = [0.0, max(stage.offered_per_s for stage in report.stages)]
    lines = [Line("as many as offered", "", rates, rates)]
    for name, points in groups.items():
        offered, answered, good = zip(*sorted(points), strict=True)
        lines.append(Line(name, name, offered, answered))
        lines.append(Line("", name, offered, good, dashed=True))
    caption = "Solid: right answers a second; dashed: those within the objective (goodput)."
    label = "requests a second, offered"
    return Chart("Throughput and goodput", caption, label, "a second", lines, y_from_0=True)


def _distribution(report: Report) -> list[Chart]:
    rows = [row for row in report.rows if row.curve_ms]
    shown = [index for index, percent in enumerate(CURVE) if 0 < percent < 100]
    latency = [
        Line(_name(row), _name(row), [CURVE[i] for i in shown], [row.curve_ms[i] for i in shown])
        for row in rows
    ]
    percents = (50.0, 95.0, 99.0)
    first = [
        _points(
            row, percents, (row.first_token_p50_ms, row.first_token_p95_ms, row.first_token_p99_ms)
        )
        for row in rows
    ]
    gaps = [
        _points(row, percents, (row.gap_p50_ms, row.gap_p95_ms, row.gap_p99_ms)) for row in rows
    ]
    caption = "How long so many of 100 requests took at most."
    percent = "requests of 100"
    drawn = (
        ("Latency", caption, percent, latency, "latency"),
        ("Time to first token", caption, percent, first, "ttft"),
        (
            "Time between tokens",
            "How long so many of 100 gaps were at most.",
            "gaps of 100",
            gaps,
            "itl",
        ),
    )
    return [
        Chart(title, about, label, "ms", lines, "tail", "log", _limits(report, what))
        for title, about, label, lines, what in drawn
    ]


def _points(row: Row, x: Sequence[float], y: Sequence[float | None]) -> Line:
    pairs = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    return Line(_name(row), _name(row), [each[0] for each in pairs], [each[1] for each in pairs])


def _timeline(report: Report) -> Chart:
    timed = [slice_ for slice_ in report.timeline if slice_.p50_ms is not None]
    at_s = [slice_.at_s for slice_ in timed]
    middle = [slice_.p50_ms or 0.0 for slice_ in timed]
    tail = [slice_.p99_ms or 0.0 for slice_ in timed]
    lines = [Line("p50", "all", at_s, middle), Line("p99", "all", at_s, tail, dashed=True)]
    due = [(slice_.at_s, float(slice_.due)) for slice_ in report.timeline if slice_.due]
    rate_x, rate_y = zip(*due, strict=True) if due else ((), ())
    lines.append(Line("requests due in the second", "due", rate_x, rate_y))
    caption = "Latency of the requests that were due in each second, and how many those were."
    label = "seconds after the begin"
    return Chart("Second by second", caption, label, "ms; requests", lines, y_scale="log")


def _frontier(report: Report) -> list[Chart]:
    """Quality against latency at each rate: of each model, since metrics differ."""
    found = []
    for model in sorted({row.model for row in report.rows}):
        lines: list[Line] = []
        metric, known = "quality", False
        for rate, endpoint, rows in _merged(report):
            points = [
                (row.p99_ms, row.expected if row.accuracy is None else row.accuracy, row)
                for row in rows
                if row.model == model
            ]
            # Fixed steps first and by steps, so that the line follows the ladder.
            placed = [(x, y, row) for x, y, row in points if x is not None and y is not None]
            if not placed:
                continue
            metric = placed[0][2].metric or metric
            known = placed[0][2].accuracy is not None
            label = f"{endpoint}, {rate:.0f}/s" if rate else endpoint
            for loose in (False, True):
                some = [each for each in placed if (each[2].steps is None) == loose]
                spread = [
                    (y - row.accuracy_interval[0], row.accuracy_interval[1] - y)
                    for _, y, row in some
                    if row.accuracy_interval
                ]
                names = [row.ask.removeprefix("steps=") for _, _, row in some]
                x, y = [each[0] for each in some], [each[1] for each in some]
                shown = "" if loose and len(some) < len(placed) else label
                lines.append(Line(shown, label, x, y, False, loose, spread, names))
        if sum(len(line.x) for line in lines) < 2:
            continue
        source = (
            "Measured on the texts whose labels were given, with 95 % intervals."
            if known
            else "As the server states it for the steps that were used."
        )
        better = " Of a loss, less is better." if metric == "loss" and not known else ""
        label = "accuracy of answers" if known else f"stated {metric}"
        found.append(
            Chart(
                f"Quality against latency under load: {model}",
                f"Numbers beside points are steps. {source}{better}",
                "ms, 99 of 100 requests",
                label,
                lines,
                "log",
            )
        )
    return found


def _merged(report: Report) -> list[tuple[float, str, list[Row]]]:
    """The rows of all stages of the same planned rate, by endpoint."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for stage in report.stages:
        for row in stage.rows:
            groups.setdefault((stage.rate_per_s or 0.0, row.endpoint), []).append(row)
    return [(rate, endpoint, groups[rate, endpoint]) for rate, endpoint in sorted(groups)]


def _steps_used(report: Report) -> list[Chart]:
    rows = [row for row in report.rows if row.steps is None and row.steps_used]
    counts = sorted({float(steps) for row in rows for steps in row.steps_used})
    lines = []
    for steps in counts:
        shares = [
            row.steps_used.get(f"{steps:g}", 0) / sum(row.steps_used.values()) for row in rows
        ]
        lines.append(
            Line(
                f"steps {steps:g}",
                f"{steps:g}",
                range(len(rows)),
                shares,
                names=[*map(_name, rows)],
            )
        )
    caption = "How many of the answers were made with so many steps, where the server could choose."
    return [Chart("Steps used", caption, "share of answers", "", lines, stacked=True)]


def _limits(report: Report, what: str) -> list[tuple[str, float]]:
    limits = parse_objective(report.objective).limits
    return [(limit.text, limit.bound) for limit in limits if limit.what == what]


def _name(row: Row) -> str:
    return f"{row.endpoint} {row.model} {row.ask}"
