"""`--find-capacity`: runs tests at the rates that loadtest/search.py asks for, and reports."""

import argparse
import json
import math
import tempfile
from argparse import Namespace
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from loadtest.launch import locust_command, run
from loadtest.objective import Objective, parse_objective
from loadtest.options import duration_s_of
from loadtest.output import room, say, write_text, write_whole
from loadtest.page import Chart, Line, draw_png, draw_svg, page, table
from loadtest.schedule import parse_levels
from loadtest.search import Capacity, MeasuringEndedError, Point, Search
from loadtest.tables import UNLIMITED, Cells, markdown_table, number, text_table, wrapped

_HEADINGS = ("rate/s", "requests", "good/s", "p50", "p99", "objective", "sure", "what")
_LONGER = 4  # times --duration, at most, for rates at which few requests come
_LEAST_REQUESTS = 200
_WARM_UP_S = 2.0
_PROCESSES_S = 8.0  # to start, to lay the schedule and to end


def find_capacity(options: argparse.Namespace, start_per_s: float) -> Capacity:
    """Measure rates one after another, and say what each gave."""
    objective = parse_objective(options.objective)
    longest_s = options.most_points * longest_s_of(options, objective)
    say(
        f"Looking for the highest rate that keeps {options.objective}: at most "
        f"{options.most_points} tests, at most about {longest_s / 60:.0f} minutes."
    )
    with tempfile.TemporaryDirectory() as folder:

        def measure(rate_per_s: float, number: int) -> Point:
            return _measure(options, objective, rate_per_s, number, Path(folder))

        search = Search(measure, _tell, options.precision, options.most_points)
        return search.run(start_per_s)


def start_of(options: argparse.Namespace) -> float:
    """The rate that is measured first: the first of --rate."""
    rates = parse_levels(options.rate)
    return rates[0].begin_per_s if rates else 10.0


def write_capacity(capacity: Capacity, objective: str, folder: Path) -> None:
    """Keep it as capacity.json, capacity.md, capacity.html and capacity.png."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"schema_version": 1, "objective": objective, **asdict(capacity)}
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_text(folder / "capacity.json", text)
    cells, chart = _table(capacity), _chart(capacity, objective)
    about = f"Objective: {objective}. {capacity.sentence}"
    markdown = f"# Capacity\n\n{about}\n\n{markdown_table(cells)}\n"
    write_text(folder / "capacity.md", markdown)
    figure = f"<figure><h3>{chart.title}</h3>{draw_svg(chart)}</figure>"
    parts = [
        "<h1>Capacity</h1>",
        f'<p class="about">{escape(about, quote=False)}</p>',
        figure,
        table(cells),
    ]
    html = page("Stepdial capacity", parts)
    write_text(folder / "capacity.html", html)
    write_whole(folder / "capacity.png", lambda part: draw_png(about, [chart], part))


def render_capacity(capacity: Capacity) -> str:
    """For a terminal."""
    width = room(UNLIMITED)
    return text_table(_table(capacity), width) + "\n\n" + wrapped(capacity.sentence, width)


def _tell(point: Point) -> None:
    say("  " + "  ".join(_cells(point)))


def _measure(
    options: argparse.Namespace,
    objective: Objective,
    rate_per_s: float,
    number: int,
    folder: Path,
) -> Point:
    shares = [limit.share or 0.0 for limit in objective.limits]
    wanted = max(5 / (1 - max(shares)), _LEAST_REQUESTS)
    chosen_s = duration_s_of(options)
    seconds = min(max(chosen_s, wanted / rate_per_s), _LONGER * chosen_s)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    point = Namespace(
        **{
            **vars(options),
            # Two halves without a pause: a queue that grows shows in the second.
            "rate": f"{rate_per_s:.6g},{rate_per_s:.6g}",
            "duration": f"{max(math.ceil(seconds / 2), 1)}s",
            "pause": 0.0,
            "warm_up": max(options.warm_up, _WARM_UP_S),
            "drain": drain_s_of(options, objective),
            "seed": options.seed + number,
            "out": str(report),
        }
    )
    ending = run(locust_command(point, options.url), silent=True)
    if ending.interrupted:
        raise MeasuringEndedError(f"interrupted in the test at {rate_per_s:.4g}/s")
    if not report.exists():
        raise MeasuringEndedError(
            f"the test at {rate_per_s:.4g}/s ended with status {ending.status} and no report"
        )
    return _point(rate_per_s, json.loads(report.read_text(encoding="utf-8")))


def longest_s_of(options: argparse.Namespace, objective: Objective) -> float:
    """How long one test may take: both halves, what comes before and after, and its processes."""
    around_s: float = max(options.warm_up, _WARM_UP_S) + drain_s_of(options, objective)
    return _LONGER * duration_s_of(options) + around_s + _PROCESSES_S


def drain_s_of(options: argparse.Namespace, objective: Objective) -> float:
    """How long to wait for the last answers."""
    drain_s: float = options.answer_timeout if options.drain is None else options.drain
    if any(limit.what != "latency" for limit in objective.limits):
        return drain_s
    # An answer later than this has missed them all anyway.
    slowest_ms = max((limit.bound for limit in objective.limits), default=0.0)
    return min(drain_s, max(2 * slowest_ms / 1e3, 2.0))


def _point(rate_per_s: float, record: dict[str, Any]) -> Point:
    verdicts = record["verdicts"]
    later = record["stages"][-1]["verdicts"]
    missed = [each for each in verdicts if not each["met"]]
    growing = [each for each in later if not each["met"]]
    met = not missed and not growing
    sure = all(each["sure"] for each in verdicts) if met else any(each["sure"] for each in missed)
    rows = [row for row in record["rows"] if row["p50_ms"] is not None]
    shown = missed or growing or verdicts
    return Point(
        rate_per_s=rate_per_s,
        met=met,
        sure=sure,
        limited=record["saturated"],
        requests=record["requests"],
        good_per_s=record["good_per_s"],
        p50_ms=max((row["p50_ms"] for row in rows), default=None),
        p99_ms=max((row["p99_ms"] for row in rows), default=None),
        why="; ".join(f"{each['limit']}: {_value(each)}" for each in shown)
        + (" (in the second half)" if growing and not missed else "")
        + (" SENDER SATURATED" if record["saturated"] else ""),
    )


def _value(verdict: dict[str, Any]) -> str:
    return "never" if verdict["value"] is None else number(verdict["value"], 3)


def _table(capacity: Capacity) -> Cells:
    by_rate = sorted(capacity.points, key=lambda point: point.rate_per_s)
    return [_HEADINGS, *map(_cells, by_rate)]


def _cells(point: Point) -> list[str]:
    return [
        *(f"{point.rate_per_s:.4g}", str(point.requests), number(point.good_per_s)),
        *(number(point.p50_ms), number(point.p99_ms), "met" if point.met else "MISSED"),
        *("yes" if point.sure else "no", point.why),
    ]


def _chart(capacity: Capacity, objective: str) -> Chart:
    points = sorted(capacity.points, key=lambda point: point.rate_per_s)
    lines = []
    for label, values, dashed in (
        ("p50", [(one.rate_per_s, one.p50_ms) for one in points], False),
        ("p99", [(one.rate_per_s, one.p99_ms) for one in points], True),
    ):
        kept = [(rate, value) for rate, value in values if value is not None]
        x, y = [rate for rate, _ in kept], [value for _, value in kept]
        lines.append(Line(label, "latency", x, y, dashed))
    lines.append(
        Line(
            "good answers per second",
            *("good", [one.rate_per_s for one in points], [one.good_per_s for one in points]),
        )
    )
    limits = parse_objective(objective).limits
    return Chart(
        *("Latency and goodput against rate", "", "offered requests per second"),
        *("ms; per second", lines),
        y_scale="log",
        limits=[(limit.text, limit.bound) for limit in limits if limit.what == "latency"],
    )
