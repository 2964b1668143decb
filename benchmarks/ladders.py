"""Quality per millisecond: each rung of a model beside plain models of one block and of several.

    python -m benchmarks.ladders --bundles zoo/logic PLAIN1 PLAIN2 PLAIN4 PLAIN8
    python -m benchmarks.ladders --draw

The first bundle has the dial; the others are plain models of the same data. Qualities are those of
the manifests, measured on held-out data in the runtime that serves; one row's latency in that
runtime is measured here, all models in turn. `--draw` draws docs/ladders.svg from what was kept.
"""

import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab import (
    RESULTS,
    ROOT,
    Cell,
    Options,
    Provenance,
    Result,
    Table,
    Times,
    clocked,
    interleave,
    options,
    parser,
    run,
)
from benchmarks.texts import check_same_data, tagged_texts
from export.inspect import metric_in_words
from serve.bundle import Bundle, Rung, steps_in_words
from serve.inputs.text import TextCodec
from serve.runtime import open_model

NAME = "ladder"
PICTURE = ROOT / "docs" / "ladders.svg"
COLUMNS = ("model", "kind", "blocks", "parameters", "steps", "ms", "metric", "value", "low", "high")
ROWS = 16  # texts, one after another


def main(arguments: Sequence[str]) -> int:
    read = parser(__doc__.partition("\n")[0])
    read.add_argument("--draw", action="store_true", help="measure nothing: only draw the picture")
    read.add_argument("--data", default="", metavar="PATH", help="where the dial's data is now")
    parsed = read.parse_args(arguments)
    if parsed.draw:
        draw(kept(parsed.results or RESULTS), PICTURE)
        print(f"drawn: {PICTURE.relative_to(ROOT)}")
        return 0
    status = run("ladders", arguments, parsed, partial(measure, options(parsed), parsed.data))
    if not parsed.quick and parsed.results is None:
        draw(kept(RESULTS), PICTURE)
    return status


def measure(chosen: Options, data: str, provenance: Provenance) -> Result:
    dial, *plain = bundles = chosen.read("tag")
    check_same_data(dial, plain)
    texts = [one.text for one in tagged_texts(dial, data)[:ROWS]]
    calls: dict[tuple[str, int], Callable[[], Times]] = {}
    for bundle in bundles:
        model, codec = open_model(bundle, 1), TextCodec(bundle)
        rows = [np.array([codec.encode_positions(text, True).tokens]) for text in texts]
        for steps in bundle.manifest.steps:
            each = partial(_each, model.classifier(steps).run, rows)
            calls[bundle.manifest.name, steps] = partial(clocked, each, 1.0)
    times = interleave(calls, 0.5 if chosen.quick else 20.0, least=5)
    points = [
        point_of(bundle, rung, bundle is dial, times[bundle.manifest.name, rung.steps])
        for bundle in bundles
        for rung in bundle.manifest.rungs
    ]
    name = dial.manifest.name
    return provenance.result(
        f"{NAME}_{name}",
        f"Quality per millisecond: {name}",
        "One row on one thread, in the runtime that serves: milliseconds of the processor, the "
        "median over rounds in which all models take turns. Plain models have as many blocks of "
        "their own as they run; the dial runs one set of blocks again at each step. Quality: "
        "held-out data.",
        [
            Table("All points of the picture.", COLUMNS, [point.cells for point in points]),
            Table("The dial beside the plain models.", ("what", "found"), says(points)),
        ],
        [],
    )


def _each(run_rows: Callable[[Any], object], rows: Sequence[Any]) -> None:
    for row in rows:
        run_rows(row)


@dataclass(frozen=True, slots=True)
class Point:
    """A rung, or a plain model."""

    model: str
    dial: bool
    blocks: int
    parameters: int
    steps: int
    ms: float
    metric: str
    value: float
    low: float
    high: float

    @property
    def cells(self) -> Sequence[Cell]:
        kind = "dial" if self.dial else "plain"
        sizes = (self.blocks, self.parameters, self.steps, self.ms)
        return (self.model, kind, *sizes, self.metric, self.value, self.low, self.high)

    @classmethod
    def of(cls, cells: Sequence[Any]) -> "Point":
        """Of a row of the table."""
        model, kind, *rest = cells
        return cls(model, kind == "dial", *rest)

    @property
    def better(self) -> float:
        """Greater is better."""
        return -self.value if self.metric == "loss" else self.value


def point_of(bundle: Bundle, rung: Rung, dial: bool, times: Sequence[Times]) -> Point:
    m, q = bundle.manifest, rung.quality
    ms = float(np.median([one.cpu_ms for one in times])) / ROWS
    sizes = (m.shape.layers, m.shape.parameters, rung.steps, ms)
    return Point(m.name, dial, *sizes, q.metric, q.value, q.low, q.high)


def says(points: Sequence[Point]) -> list[Sequence[Cell]]:
    """Each rung beside the line through the plain models, and beside their sizes."""
    plain = sorted((p for p in points if not p.dial), key=lambda p: p.ms)
    rows: list[Sequence[Cell]] = []
    for rung in (p for p in points if p.dial):
        what = steps_in_words(rung.steps)
        line = at_latency(plain, rung.ms)
        if line is None:
            rows.append([f"{what}, beside plain models as fast", "none is as fast"])
        else:
            above = rung.better - line
            beyond = " (slower than all: the best of them)" if rung.ms > plain[-1].ms else ""
            rows.append([f"{what}, beside plain models as fast", f"{above:+.4f}{beyond}"])
        good = [p.parameters for p in plain if p.better >= rung.better]
        size = min(good) if good else max((p.parameters for p in plain), default=0)
        share = rung.parameters / size if size else math.nan
        rows.append(
            [
                f"{what}, parameters beside a plain model as good",
                f"{rung.parameters:,} against {'' if good else 'more than '}{size:,}: "
                f"{'' if good else 'less than '}{share:.2f} times",
            ]
        )
    return rows


def at_latency(plain: Sequence[Point], ms: float) -> float | None:
    """The quality on the line through plain models, in the order of their latency.

    The line is straight in the logarithm of the latency, as in the picture. A slower server may run
    any faster model, so the best so far counts; None before the first.
    """
    if not plain or ms < plain[0].ms:
        return None
    best = max(p.better for p in plain if p.ms <= ms)
    for one, other in pairwise(plain):
        if one.ms <= ms <= other.ms and other.ms > one.ms:
            share = math.log(ms / one.ms) / math.log(other.ms / one.ms)
            best = max(best, one.better + share * (other.better - one.better))
    return best


# The picture.


INK, FAINT, PAPER = "#1c2330", "#d9dee7", "#ffffff"
DIAL, PLAIN = "#0b7a75", "#b4541a"
_DARK = {INK: "#e6e9ef", FAINT: "#3a4150", PAPER: "#12161d", DIAL: "#4fc7bf", PLAIN: "#f0995c"}
_NAMES = {INK: "ink", FAINT: "faint", PAPER: "paper", DIAL: "dial", PLAIN: "plain"}
_STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "stepdial",
}


def kept(folder: Path) -> list[list[Point]]:
    """The points of each task that was measured."""
    results = [Result.read(path) for path in sorted(folder.glob(f"{NAME}_*.json"))]
    return [[Point.of(row) for row in result.tables[0].rows] for result in results]


def draw(tasks: Sequence[Sequence[Point]], path: Path) -> None:
    """A row a task: quality against latency, and against parameters. Same points, same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    if not tasks:
        raise SystemExit("nothing was measured yet: name bundles")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.2, 3.7 * len(tasks)), layout="constrained")
        grid = figure.subplots(len(tasks), 2, squeeze=False)
        for (against_ms, against_size), points in zip(grid, tasks, strict=True):
            _panel(against_ms, points, "ms", "milliseconds of the processor, one row")
            _panel(against_size, points, "parameters", "parameters")
            name = next(point.model for point in points if point.dial)
            against_ms.set_title(f"{name}: quality per millisecond", loc="left", fontsize=10)
            against_size.set_title(f"{name}: quality per parameter", loc="left", fontsize=10)
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    path.write_text(_for_both(buffer.getvalue()), encoding="utf-8")


def _panel(axes: Any, points: Sequence[Point], x: str, label: str) -> None:
    scale = 1.0 if points[0].metric == "loss" else 100.0
    for is_dial, colour, text in (
        (True, DIAL, "one model with a dial; labels: steps"),
        (False, PLAIN, "plain models; labels: blocks"),
    ):
        shown = sorted(
            (p for p in points if p.dial is is_dial), key=lambda p: (getattr(p, x), p.steps)
        )
        axes.errorbar(
            [getattr(p, x) for p in shown],
            [scale * p.value for p in shown],
            [
                [scale * (p.value - p.low) for p in shown],
                [scale * (p.high - p.value) for p in shown],
            ],
            color=colour,
            label=text,
            linestyle="-" if is_dial else "--",
            marker="o" if is_dial else "s",
            markersize=4,
            linewidth=1.5,
            capsize=2.5,
            elinewidth=0.8,
        )
        upright = x == "parameters"  # the dial's points, right of the plain model of its size
        others = sorted((getattr(p, x), p.value) for p in points if p.dial is not is_dial)
        for index, p in enumerate(shown):
            if is_dial and upright:
                side, offset = ("left", (6, -3)) if index % 2 == 0 else ("right", (-6, -3))
            elif upright or p.value >= _height(others, getattr(p, x)):
                side, offset = "right", (-4, 4)  # above its line, where the other one is not
            else:
                side, offset = "left", (4, -12)
            axes.annotate(
                str(p.steps if is_dial else p.blocks),
                (getattr(p, x), scale * p.value),
                offset,
                ha=side,
                textcoords="offset points",
                color=colour,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(_ticks())
    axes.xaxis.set_major_formatter("{x:,.0f}" if x == "parameters" else "{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(label)
    metric = points[0].metric
    axes.set_ylabel(
        f"{metric_in_words(metric)}, lower is better"  # type: ignore[arg-type]  # read as text
        if metric == "loss"
        else f"{metric}, % of positions"
    )
    if metric == "loss":
        axes.invert_yaxis()
    axes.grid(True, axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.12, y=0.1)


def _height(line: Sequence[tuple[float, float]], place: float) -> float:
    """The value of a line there; minus infinity if there is none."""
    return float(np.interp(place, *np.array(line).T)) if line else -math.inf


def _ticks() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1.0, 2.0, 5.0))


def _for_both(svg: str) -> str:
    """Colours as variables that follow the reader's choice of light or dark."""
    for colour, name in _NAMES.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    light = "".join(f"--{name}:{colour};" for colour, name in _NAMES.items())
    dark = "".join(f"--{_NAMES[colour]}:{other};" for colour, other in _DARK.items())
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head = svg.index(">", svg.index("<svg")) + 1
    return svg[:head] + "\n " + style + svg[head:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
