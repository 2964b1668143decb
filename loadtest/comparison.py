"""`stepdial loadtest compare`: two kept reports side by side."""

import html
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.output import room, say, write_text, write_whole
from loadtest.page import Chart, Line, draw_png, draw_svg, page, table
from loadtest.report import Kept, KeptError, KeptRow, read_report
from loadtest.tables import UNLIMITED, Cells, markdown_table, number, text_table, wrapped
from stepdial import Options

# What is compared, its name, and where its interval is kept if there is one.
_FIGURES = (
    ("requests_per_s", "req/s", None),
    ("errors", "errors", None),
    ("refused", "refused", None),
    ("p50_ms", "p50 ms", "p50_interval_ms"),
    ("p95_ms", "p95 ms", None),
    ("p99_ms", "p99 ms", "p99_interval_ms"),
    ("first_token_p50_ms", "first token p50 ms", None),
    ("first_token_p99_ms", "first token p99 ms", None),
    ("gap_p50_ms", "gap p50 ms", None),
    ("gap_p99_ms", "gap p99 ms", None),
    ("per_token_p50_ms", "tpot p50 ms", None),
    ("per_token_p99_ms", "tpot p99 ms", None),
    ("steps_mean", "steps used", None),
    ("accuracy", "accuracy", "accuracy_interval"),
)
_ABSENT_WHEN_NONE = ("errors", "refused")
_HEADINGS = ("rate", "operation", "what", "A", "B", "B / A", "differ")


class ComparisonError(Exception):
    """The reports cannot be compared; the text says why."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs; `differ` says whether their 95 % intervals are apart."""

    rate_per_s: float | None
    operation: str
    what: str
    a: float
    b: float
    differ: bool | None  # None: no intervals


def main(argv: Sequence[str]) -> int:
    """Compare two reports; 0, or 2 if they cannot be compared."""
    parser = Options(
        prog="stepdial loadtest compare",
        description="Set two reports of `stepdial loadtest --out` side by side.",
        allow_abbrev=False,
    )
    for name in ("a", "b"):
        about = "report.json, or the folder that holds it"
        parser.add_argument(name, type=Path, metavar=name.upper(), help=about)
    about = "folder for comparison.json, comparison.md, comparison.html and comparison.png"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about)
    options = parser.parse_args(argv)
    try:
        a, b = read_report(options.a), read_report(options.b)
        changes = compare(a, b)
    except (KeptError, ComparisonError) as error:
        say(str(error), sys.stderr)
        return 2
    notes = differences(a, b)
    width = room(UNLIMITED)
    noted = [wrapped(note, width) for note in notes]
    say("\n".join([text_table(cells(changes), width), "", *noted]))
    if options.out:
        try:
            write_comparison(a, b, changes, notes, options.out)
        except OSError as error:
            say(f"The comparison could not be written to {options.out}: {error}.", sys.stderr)
            return 2
        say(f"Comparison written to {options.out}.")
    return 0


def compare(a: Kept, b: Kept) -> list[Change]:
    """Every figure that both have: by stage where both went through the same rates."""
    rows_a, rows_b = _rows(a), _rows(b)
    if [*rows_a] != [*rows_b]:  # other rates: only the whole tests can be compared
        rows_a, rows_b = _whole(a), _whole(b)
    shared = [key for key in rows_a if key in rows_b]
    if not shared:
        raise ComparisonError("The two tests have no operation in common.")
    changes = []
    for key in shared:
        for name, what, interval in _FIGURES:
            one, other = (rows[key].figures.get(name) for rows in (rows_a, rows_b))
            if one is None or other is None:
                continue
            if name in _ABSENT_WHEN_NONE and not one and not other:
                continue
            first, second = (rows[key].intervals.get(interval or "") for rows in (rows_a, rows_b))
            differ = None if first is None or second is None else _apart(first, second)
            changes.append(Change(key[1], key[2], what, one, other, differ))
    return changes


def differences(a: Kept, b: Kept) -> list[str]:
    """What makes the two tests less comparable."""
    notes = [
        f"{name}: A {_term(a.terms[name])}, B {_term(b.terms[name])}"
        for name in a.terms
        if a.terms[name] != b.terms[name]
    ]
    notes += [
        f"{name} was SATURATED in what sent it: its figures are not about the server"
        for name, record in (("A", a), ("B", b))
        if record.saturated
    ]
    return notes


def cells(changes: Sequence[Change]) -> Cells:
    """The table."""
    return [_HEADINGS, *map(_cells, changes)]


def write_comparison(
    a: Kept, b: Kept, changes: Sequence[Change], notes: Sequence[str], folder: Path
) -> None:
    """Keep it in every form."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"schema_version": 1, "notes": notes, "changes": [asdict(each) for each in changes]}
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_text(folder / "comparison.json", text)
    listed = "\n".join(f"* {note}" for note in notes)
    markdown = f"# Two load tests\n\n{markdown_table(cells(changes))}\n\n{listed}\n"
    write_text(folder / "comparison.md", markdown)
    drawn = [chart for chart in _charts(a, b) if chart.lines]
    figures = "".join(
        f"<figure><h3>{html.escape(chart.title)}</h3>{draw_svg(chart)}</figure>" for chart in drawn
    )
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    parts = ["<h1>Two load tests</h1>", f"<ul>{items}</ul>", f'<div class="charts">{figures}</div>']
    whole = page(
        "Stepdial load tests compared", [*parts, "<h2>Figures</h2>", table(cells(changes))]
    )
    write_text(folder / "comparison.html", whole)
    write_whole(folder / "comparison.png", lambda part: draw_png("Two load tests", drawn, part))


Key = tuple[int, float | None, str]  # place and rate of a stage, and the operation


def _rows(report: Kept) -> dict[Key, KeptRow]:
    return {
        (place, stage.rate_per_s, row.name): row
        for place, stage in enumerate(report.stages)
        for row in stage.rows
        if row.requests
    }


def _whole(report: Kept) -> dict[Key, KeptRow]:
    return {(0, None, row.name): row for row in report.rows if row.requests}


def _term(value: object) -> object:
    return "none" if value is None or value == "" else value


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def _cells(change: Change) -> list[str]:
    ratio = f"{change.b / change.a:.3f}" if change.a else "–"
    rate = "all" if change.rate_per_s is None else number(change.rate_per_s)
    differ = {None: "–", True: "surely", False: "unsure"}[change.differ]
    values = number(change.a, 2), number(change.b, 2)
    return [rate, change.operation, change.what, *values, ratio, differ]


def _charts(a: Kept, b: Kept) -> list[Chart]:
    """Latency of both: against rate where there are several, else by how many requests."""
    several = any(len(report.stages) > 1 for report in (a, b))
    found = []
    both = {row.name for row in b.rows if row.requests}
    for operation in (row.name for row in a.rows if row.requests and row.name in both):
        lines = []
        for label, report in (("A", a), ("B", b)):
            for what, dashed in (("p50_ms", False), ("p99_ms", True)):
                points = sorted(
                    (stage.offered_per_s, row.figures[what])
                    for stage in report.stages
                    for row in stage.rows
                    if row.name == operation and what in row.figures
                )
                x, y = [rate for rate, _ in points], [value for _, value in points]
                if points:
                    lines.append(Line(f"{label}, {what[:3]}", label, x, y, dashed))
        label = "offered requests per second" if several else "requests per second"
        found.append(Chart(f"Latency: {operation}", "", label, "ms", lines, y_scale="log"))
    return found
