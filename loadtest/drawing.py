"""Charts drawn with matplotlib: as SVG to put into a page, and together as one PNG.

It deliberately knows nothing of reports.
"""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator

from loadtest.charts import Chart, Line

# Colours that people who see few colours can tell apart (Okabe and Ito), blue first.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b", "#8c510a")
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
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "stepdial",
}


def draw_svg(chart: Chart) -> str:
    """The picture as an <svg> element without anything outside itself."""
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
    rows = max(math.ceil(len(drawn) / 2), 1)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13.5, 4.6 * rows + 0.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for number, chart in enumerate(drawn, 1):
            axes = figure.add_subplot(rows, 2, number)
            _draw(axes, chart)
            axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
        figure.savefig(path, dpi=110)


def _draw(axes: Axes, chart: Chart) -> None:
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


def _draw_lines(axes: Axes, chart: Chart) -> None:
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


def _name_ticks(axis: Axis) -> None:
    """Plain numbers, also between powers of ten where there are few of those."""
    axis.set_major_formatter(_PlainNumbers())
    axis.set_minor_formatter(_PlainNumbers(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))


class _PlainNumbers(LogFormatter):
    """Writes 0.1 where its base writes 1e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _draw_line(axes: Axes, chart: Chart, line: Line, colour: str) -> None:
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


def _draw_stacked(axes: Axes, chart: Chart) -> None:
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
