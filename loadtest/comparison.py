"""`stepdial loadtest compare`: two kept reports side by side.

It deliberately knows nothing of running tests.
"""

import argparse
import html
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.charts import Chart, Line
from loadtest.drawing import draw_png, draw_svg
from loadtest.page import page, table
from loadtest.report import SCHEMA_VERSION
from loadtest.tables import Cells, markdown_table, number, text_table

Record = dict[str, Any]

# What is compared, its name, and where its interval is kept if there is one.
_FIGURES = (
    ("requests_per_s", "req/s", None),
    ("errors", "errors", None),
    ("p50_ms", "p50 ms", "p50_interval_ms"),
    ("p95_ms", "p95 ms", None),
    ("p99_ms", "p99 ms", "p99_interval_ms"),
    ("first_token_p50_ms", "first token p50 ms", None),
    ("first_token_p99_ms", "first token p99 ms", None),
    ("gap_p50_ms", "gap p50 ms", None),
    ("gap_p99_ms", "gap p99 ms", None),
    ("steps_mean", "steps used", None),
    ("accuracy", "accuracy", "accuracy_interval"),
)
_TERMS = ("url", "mix", "arrivals", "users", "seed", "objective", "client")
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
    parser = argparse.ArgumentParser(
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
    except ComparisonError as error:
        print(error, file=sys.stderr)
        return 2
    notes = differences(a, b)
    print("\n".join([text_table(cells(changes)), "", *notes]))
    if options.out:
        write_comparison(a, b, changes, notes, options.out)
        print(f"Comparison written to {options.out}.")
    return 0


def read_report(path: Path) -> Record:
    """A report.json of this version."""
    file = path / "report.json" if path.is_dir() else path
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version = record["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ComparisonError(f"{file} is no report of a load test: {error}") from None
    if version != SCHEMA_VERSION:
        raise ComparisonError(
            f"{file} has schema version {version}, not {SCHEMA_VERSION}: run that test again."
        )
    found: Record = record
    return found


def compare(a: Record, b: Record) -> list[Change]:
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
            one, other = rows_a[key].get(name), rows_b[key].get(name)
            if one is None or other is None or (name == "errors" and not one and not other):
                continue
            pair = [rows[key].get(interval) for rows in (rows_a, rows_b)] if interval else [None]
            differ = None if None in pair else _apart(*pair)
            changes.append(Change(key[0], key[1], what, one, other, differ))
    return changes


def differences(a: Record, b: Record) -> list[str]:
    """What makes the two tests less comparable."""
    notes = [f"{name}: A {a[name]}, B {b[name]}" for name in _TERMS if a.get(name) != b.get(name)]
    notes += [
        f"{name} was SATURATED in what sent it: its figures are not about the server"
        for name, record in (("A", a), ("B", b))
        if record["saturated"]
    ]
    return notes


def cells(changes: Sequence[Change]) -> Cells:
    """The table."""
    return [_HEADINGS, *map(_cells, changes)]


def write_comparison(
    a: Record, b: Record, changes: Sequence[Change], notes: Sequence[str], folder: Path
) -> None:
    """Keep it in every form."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"schema_version": 1, "notes": notes, "changes": [asdict(each) for each in changes]}
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    listed = "\n".join(f"* {note}" for note in notes)
    markdown = f"# Two load tests\n\n{markdown_table(cells(changes))}\n\n{listed}\n"
    (folder / "comparison.md").write_text(markdown, encoding="utf-8")
    drawn = [chart for chart in _charts(a, b) if chart.lines]
    figures = "".join(
        f"<figure><h3>{html.escape(chart.title)}</h3>{draw_svg(chart)}</figure>" for chart in drawn
    )
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    parts = ["<h1>Two load tests</h1>", f"<ul>{items}</ul>", f'<div class="charts">{figures}</div>']
    whole = page(
        "Stepdial load tests compared", [*parts, "<h2>Figures</h2>", table(cells(changes))]
    )
    (folder / "comparison.html").write_text(whole, encoding="utf-8")
    draw_png("Two load tests", drawn, folder / "comparison.png")


def _rows(record: Record) -> dict[tuple[float | None, str], Record]:
    return {
        (stage["rate_per_s"], _name(row)): row
        for stage in record["stages"]
        for row in stage["rows"]
        if row["requests"]
    }


def _whole(record: Record) -> dict[tuple[float | None, str], Record]:
    return {(None, _name(row)): row for row in record["rows"] if row["requests"]}


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def _cells(change: Change) -> list[str]:
    ratio = f"{change.b / change.a:.3f}" if change.a else "–"
    rate = "all" if change.rate_per_s is None else number(change.rate_per_s)
    differ = {None: "–", True: "surely", False: "unsure"}[change.differ]
    values = number(change.a, 2), number(change.b, 2)
    return [rate, change.operation, change.what, *values, ratio, differ]


def _charts(a: Record, b: Record) -> list[Chart]:
    """Latency of both: against rate where there are several, else by how many requests."""
    several = any(len(record["stages"]) > 1 for record in (a, b))
    found = []
    for operation in dict.fromkeys(_name(row) for row in a["rows"]):
        lines = []
        for label, record in (("A", a), ("B", b)):
            for what, dashed in (("p50_ms", False), ("p99_ms", True)):
                points = sorted(
                    (stage["offered_per_s"], row[what])
                    for stage in record["stages"]
                    for row in stage["rows"]
                    if _name(row) == operation and row[what] is not None
                )
                x, y = [rate for rate, _ in points], [value for _, value in points]
                if points:
                    lines.append(Line(f"{label}, {what[:3]}", label, x, y, dashed))
        label = "requests a second, offered" if several else "requests a second"
        found.append(Chart(f"Latency: {operation}", "", label, "ms", lines, y_scale="log"))
    return found


def _name(row: Record) -> str:
    return f"{row['endpoint']} {row['model']} {row['ask']}"
