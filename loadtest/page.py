"""A report as charts and as one HTML page, and the folder that keeps all its forms."""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loadtest.objective import parse_objective
from loadtest.outcomes import Outcome, write_requests
from loadtest.output import write_text, write_whole
from loadtest.report import CURVE, Report, Row, render_json
from loadtest.tables import (
    LEFT,
    LEGEND,
    Cells,
    failure_lines,
    health_line,
    held_line,
    number,
    render_markdown,
    row_table,
    stage_table,
    verdict,
    verdict_table,
    warnings,
)

if TYPE_CHECKING:  # it takes a second to load: where a chart is drawn
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

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
        caption = "Solid: median (p50). Dashed: 99th percentile (p99)."
        found.append(
            Chart(
                *(title, caption, "offered requests per second", "milliseconds", lines),
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
    lines = [Line("equal to the offered rate", "", rates, rates)]
    for name, points in groups.items():
        offered, answered, good = zip(*sorted(points), strict=True)
        lines.append(Line(name, name, offered, answered))
        lines.append(Line("", name, offered, good, dashed=True))
    caption = "Solid: right answers per second. Dashed: those within the objective (goodput)."
    label = "offered requests per second"
    return Chart("Throughput and goodput", caption, label, "per second", lines, y_from_0=True)


def _distribution(report: Report) -> list[Chart]:
    rows = [row for row in report.rows if row.curve_ms]
    latency = [
        _points(row, _told(row, CURVE), [row.curve_ms[CURVE.index(at)] for at in _told(row, CURVE)])
        for row in rows
    ]
    percents = (50.0, 95.0, 99.0)
    first = [
        _points(
            row,
            _told(row, percents),
            (row.first_token_p50_ms, row.first_token_p95_ms, row.first_token_p99_ms),
        )
        for row in rows
    ]
    gaps = [
        _points(row, percents, (row.gap_p50_ms, row.gap_p95_ms, row.gap_p99_ms)) for row in rows
    ]
    caption = "Latency by percentile. A percentile with no answer above it is left out."
    percent = "percentile of the requests"
    drawn = (
        ("Latency", caption, percent, latency, "latency"),
        ("Time to first token", "Time to first token, by percentile.", percent, first, "ttft"),
        (
            "Time between tokens",
            "Gaps between tokens, by percentile.",
            "percentile of the gaps",
            gaps,
            "itl",
        ),
    )
    return [
        Chart(title, about, label, "milliseconds", lines, "tail", "log", _limits(report, what))
        for title, about, label, lines, what in drawn
    ]


def _told(row: Row, percents: Sequence[float]) -> list[float]:
    """The percentiles that so many answers tell apart from the slowest."""
    answers = row.requests - row.errors
    return [at for at in percents if 0 < at < 100 and answers * (100 - at) >= 100]


def _points(row: Row, x: Sequence[float], y: Sequence[float | None]) -> Line:
    pairs = [(at, value) for at, value in zip(x, y, strict=False) if value is not None]
    return Line(_name(row), _name(row), [each[0] for each in pairs], [each[1] for each in pairs])


def _timeline(report: Report) -> Chart:
    timed = [slice_ for slice_ in report.timeline if slice_.p50_ms is not None]
    at_s = [slice_.at_s for slice_ in timed]
    middle = [slice_.p50_ms or 0.0 for slice_ in timed]
    tail = [slice_.p99_ms or 0.0 for slice_ in timed]
    lines = [Line("p50", "all", at_s, middle), Line("p99", "all", at_s, tail, dashed=True)]
    due = [(slice_.at_s, float(slice_.due)) for slice_ in report.timeline if slice_.due]
    rate_x, rate_y = zip(*due, strict=True) if due else ((), ())
    lines.append(Line("requests due per second", "due", rate_x, rate_y))
    caption = "Latency by the second in which a request was due, and how many were due in it."
    label, unit = "seconds since the start", "milliseconds, or requests per second"
    return Chart("Second by second", caption, label, unit, lines, y_scale="log")


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
            label = f"{endpoint}, {rate:g}/s" if rate else endpoint
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
            else "As the server states it for the steps used."
        )
        better = " A lower loss is better." if metric == "loss" and not known else ""
        label = "accuracy of answers" if known else f"stated {metric}"
        found.append(
            Chart(
                f"Quality against latency under load: {model}",
                f"The number beside a point is its step count. {source}{better}",
                "99th percentile of latency, milliseconds",
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
    caption = "Share of the answers at each step count, where the server could choose."
    return [Chart("Steps used", caption, "share of answers", "", lines, stacked=True)]


def _limits(report: Report, what: str) -> list[tuple[str, float]]:
    limits = parse_objective(report.objective).limits
    return [(limit.text, limit.bound) for limit in limits if limit.what == what]


def _name(row: Row) -> str:
    return f"{row.endpoint} {row.model} {row.ask}"


# Charts drawn with matplotlib: as SVG to put into a page, and together as one PNG.


# As many as a legend has lines, so that none stands for two. The first are those of Okabe and Ito,
# which people with any colour vision can tell apart.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b", "#8c510a"),
    *("#332288", "#882255", "#999933", "#f0a3c0"),
)
_INK, _FAINT, _LIMIT = "#1c2330", "#d9dee7", "#a3221b"
_MOST_IN_LEGEND = 12
_LONG_NAME = 44
_TAIL = (10, 50, 90, 95, 99, 99.9)  # percentiles that are marked
_STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "text.parse_math": False,  # names may hold dollars
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "stepdial",
}


def draw_svg(chart: Chart) -> str:
    """The picture as an <svg> element without anything outside itself."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.6, 4.3), layout="constrained")
        _draw(figure.add_subplot(), chart)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    element = text[text.index("<svg") :]
    # Ids are those of the file it would have been; in a page they must not meet.
    name = re.sub(r"\W+", "-", chart.title.lower()).strip("-")
    element = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', element)
    element = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", element)
    element = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{name}-\1"', element)
    # The description of the file names vocabularies by address; a page does not need it.
    return re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)


def draw_png(title: str, drawn: Sequence[Chart], path: Path) -> None:
    """All pictures in one file."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = max(math.ceil(len(drawn) / 2), 1)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13.5, 4.6 * rows + 0.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for number, chart in enumerate(drawn, 1):
            axes = figure.add_subplot(rows, 2, number)
            _draw(axes, chart)
            axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
        figure.savefig(path, dpi=110)


def _draw(axes: "Axes", chart: Chart) -> None:
    if chart.stacked:
        _draw_stacked(axes, chart)
    else:
        _draw_lines(axes, chart)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(True, axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    handles, names = axes.get_legend_handles_labels()
    if handles and (len(handles) > 1 or chart.stacked):
        columns = 1 if max(map(len, names)) > _LONG_NAME else 2
        axes.legend(
            *(handles[:_MOST_IN_LEGEND], names[:_MOST_IN_LEGEND]),
            fontsize=8,
            frameon=False,
            ncols=columns,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.18),
        )


def _draw_lines(axes: "Axes", chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    colours: dict[str, str] = {}
    for line in chart.lines:
        colour = colours.setdefault(line.of, _COLOURS[len(colours) % len(_COLOURS)])
        _draw_line(axes, chart, line, colour if line.of else _FAINT)
    for text, bound in chart.limits:
        axes.axhline(bound, color=_LIMIT, linewidth=1.0, linestyle=":", label=text)
    if chart.y_scale == "log":
        axes.set_yscale("log")
        _name_ticks(axes.yaxis)
    elif chart.y_from_0:
        axes.set_ylim(bottom=0)
    else:
        axes.margins(y=0.15)
    if chart.x_scale == "log":
        axes.set_xscale("log")
        _name_ticks(axes.xaxis)
    elif chart.x_scale == "tail":
        axes.xaxis.set_major_locator(FixedLocator([*map(_tail, _TAIL)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{percent:g}" for percent in _TAIL])
    else:
        axes.set_xlim(left=0)


def _name_ticks(axis: "Axis") -> None:
    """Plain numbers, also between powers of ten where there are few of those."""
    from matplotlib.ticker import LogFormatter

    class PlainNumbers(LogFormatter):
        """Writes 0.1 where its base writes 1e-01."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(PlainNumbers())
    axis.set_minor_formatter(PlainNumbers(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))


def _draw_line(axes: "Axes", chart: Chart, line: Line, colour: str) -> None:
    if not len(line.x):
        return
    x = [*map(_tail, line.x)] if chart.x_scale == "tail" else line.x
    below_above = [*zip(*line.spread, strict=True)] if line.spread else None
    axes.errorbar(
        *(x, line.y, below_above),
        color=colour,
        label=line.label or None,
        linestyle="--" if line.dashed else "-",
        linewidth=0 if line.loose else 1.4,
        marker="o" if len(line.x) <= 30 else None,
        markersize=3.5,
        capsize=2.5 if line.spread else 0,
        elinewidth=0.8,
    )
    for name, at_x, at_y in zip(line.names, x, line.y, strict=False):
        axes.annotate(
            name, (at_x, at_y), (4, 4), textcoords="offset points", fontsize=7.5, color=colour
        )


def _draw_stacked(axes: "Axes", chart: Chart) -> None:
    base = [0.0] * max((len(line.x) for line in chart.lines), default=0)
    for index, line in enumerate(chart.lines):
        colour = _COLOURS[index % len(_COLOURS)]
        axes.barh([*line.x], [*line.y], left=base, color=colour, label=line.label, height=0.6)
        base = [low + value for low, value in zip(base, line.y, strict=True)]
        axes.set_yticks([*line.x], [*line.names])
    axes.set_xlim(0, 1)
    axes.invert_yaxis()


def _tail(percent: float) -> float:
    """Stretches the slow end, where the difference between 99 and 99.9 matters."""
    return -math.log10(1 - percent / 100)


# A report as one page of HTML that needs nothing else: no file, no address, no script.


STYLE = """
  :root { color-scheme: light; }
  body { font: 15px/1.5 system-ui, sans-serif; margin: 0; color: #1c2330; background: #f6f7f9; }
  main { max-width: 92rem; margin: 0 auto; padding: 1.5rem 2rem 4rem; }
  h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
  h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
  .about { color: #4b5567; margin: 0; overflow-wrap: anywhere; }
  .tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.2rem 0; }
  .tile, figure, .wide { background: #fff; border: 1px solid #d9dee7; border-radius: 8px; }
  .tile { padding: .6rem 1rem; min-width: 8rem; }
  .tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
  .tile span { color: #4b5567; font-size: .85rem; }
  .bad { color: #a3221b; }
  .good { color: #17693f; }
  .warning { background: #fdecea; border: 1px solid #a3221b; border-radius: 8px; color: #7d1a14;
    padding: .6rem 1rem; margin: 1rem 0; font-weight: 600; }
  .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr));
    gap: 1rem; }
  figure { margin: 0; padding: 1rem; }
  figure h3 { font-size: 1rem; margin: 0; }
  figcaption { color: #4b5567; font-size: .85rem; margin-bottom: .4rem; }
  figure svg { width: 100%; height: auto; }
  .wide { overflow-x: auto; padding: .25rem .5rem; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .83rem; }
  th, td { padding: .35rem .42rem; text-align: right; border-bottom: 1px solid #e8ebf0;
    white-space: nowrap; }
  th { font-weight: 600; color: #4b5567; white-space: normal; vertical-align: bottom; }
  tr:last-child td { border-bottom: 0; }
  .left { text-align: left; }
  .legend { color: #4b5567; font-size: .85rem; max-width: 60rem; }
"""


def render_html(report: Report) -> str:
    """The page."""
    about = [report.arrivals, f"seed {report.seed}", f"ended {report.finished_at}"]
    parts = [
        "<h1>Load test</h1>",
        f'<p class="about">{html.escape(verdict(report))}</p>',
        f'<p class="about">{html.escape("; ".join(about))}.</p>',
        *(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(report)),
        _tiles(report),
    ]
    if report.verdicts:
        parts += ["<h2>Objective</h2>", table(verdict_table(report))]
    figures = "\n".join(
        f"<figure><h3>{html.escape(chart.title)}</h3>"
        f"<figcaption>{html.escape(chart.caption)}</figcaption>{draw_svg(chart)}</figure>"
        for chart in charts(report)
    )
    parts += ["<h2>Pictures</h2>", f'<div class="charts">{figures}</div>']
    parts += ["<h2>Operations</h2>", table(row_table(report.rows))]
    if len(report.stages) > 1:
        parts += ["<h2>Stages</h2>", table(stage_table(report))]
    told = (LEGEND, *held_line(report), health_line(report))
    parts += [f'<p class="legend">{html.escape(each)}</p>' for each in told]
    if report.failures:
        lines = failure_lines(report.failures)
        listed = "".join(f"<li>{html.escape(each)}</li>" for each in lines)
        parts += ["<h2>Failures</h2>", f'<ul class="bad">{listed}</ul>']
    return page("Stepdial load test", parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document."""
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""


def table(cells: Cells) -> str:
    """A table whose first row holds the headings."""
    left = [' class="left"' if heading in LEFT else "" for heading in cells[0]]
    head = "".join(
        f'<th scope="col"{side}>{html.escape(cell)}</th>'
        for cell, side in zip(cells[0], left, strict=True)
    )
    lines = [
        "<tr>"
        + "".join(
            f"<td{_coloured(cell) or side}>{html.escape(cell)}</td>"
            for cell, side in zip(row, left, strict=True)
        )
        + "</tr>"
        for row in cells[1:]
    ]
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _coloured(cell: str) -> str:
    return {"MISSED": ' class="left bad"', "met": ' class="left good"'}.get(cell, "")


def _tiles(report: Report) -> str:
    errors = "bad" if report.errors else "good"
    slowest = max((row.p99_ms for row in report.rows if row.p99_ms is not None), default=None)
    tiles = [
        (str(report.requests), "requests", ""),
        (str(report.errors), "errors", errors),
        (number(report.answered_per_s), "right answers per second", ""),
        (f"{number(slowest)} ms", "p99 of the slowest operation", ""),
    ]
    if report.verdicts:
        met = all(each.met for each in report.verdicts)
        tiles.append((number(report.good_per_s), "good answers per second", ""))
        tiles.append(("met" if met else "missed", "objective", "good" if met else "bad"))
    health = report.health
    tiles.append(
        (
            "saturated" if health.saturated else "kept up",
            "the sender",
            "bad" if health.saturated else "good",
        )
    )
    boxes = "".join(
        f'<div class="tile"><b class="{tone}">{html.escape(value)}</b><span>{label}</span></div>'
        for value, label, tone in tiles
    )
    return f'<div class="tiles">{boxes}</div>'


# Keeps a report in a folder, in every form.


def keep(report: Report, outcomes: Sequence[Outcome] | None, path: Path) -> None:
    """All forms in a folder, or only the JSON in a file of that name; each request if given."""
    alone = path.suffix == ".json"
    folder = path.parent if alone else path
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path if alone else folder / "report.json", render_json(report))
    if outcomes is not None:
        write_whole(folder / "requests.csv", lambda part: write_requests(outcomes, part))
    if not alone:
        write_report(report, folder)


def write_report(report: Report, folder: Path) -> None:
    """What people look at: report.md, report.html and report.png."""
    write_text(folder / "report.md", render_markdown(report))
    write_text(folder / "report.html", render_html(report))
    drawn = charts(report)
    write_whole(folder / "report.png", lambda part: draw_png(verdict(report), drawn, part))
