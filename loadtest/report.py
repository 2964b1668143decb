"""The report of a load test: a table for the terminal, and JSON, Markdown and HTML to keep.

It deliberately knows nothing of how the numbers were measured.
"""

import html
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from loadtest.outcomes import Failure, Row

_HEADINGS = (
    "endpoint",
    "model",
    "steps",
    "requests",
    "errors",
    "req/s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "first p50",
    "first p95",
    "tok/s each",
    "tok/s all",
)
_LEGEND = (
    "Times are of right answers only. first: milliseconds to the first token. "
    "tok/s: tokens a second of the median stream, and of all streams together."
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is printed or kept of one load test."""

    url: str
    users: int
    mix: str
    elapsed_s: float
    rows: Sequence[Row]
    failures: Sequence[Failure]

    @property
    def requests(self) -> int:
        return sum(row.requests for row in self.rows)

    @property
    def errors(self) -> int:
        return sum(row.errors for row in self.rows)

    @property
    def passed(self) -> bool:
        """Something was answered, and nothing went wrong."""
        return self.requests > 0 and self.errors == 0


def write_report(report: Report, folder: Path) -> None:
    """Keep the report as report.json, report.md and report.html in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(render_json(report), encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")


def render_json(report: Report) -> str:
    """Unrounded numbers, and the machine that sent the load."""
    record = {
        "schema_version": 1,
        "url": report.url,
        "users": report.users,
        "mix": report.mix,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "elapsed_s": report.elapsed_s,
        "requests": report.requests,
        "errors": report.errors,
        "client": {"platform": platform.platform(), "cores": os.cpu_count()},
        "rows": [asdict(row) for row in report.rows],
        "failures": [asdict(failure) for failure in report.failures],
    }
    return json.dumps(record, indent=2) + "\n"


def render_text(report: Report) -> str:
    """A table for a terminal."""
    cells = [list(_HEADINGS), *map(_cells, report.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for index, row in enumerate(cells):
        words = row[:2], row[2:]
        left = [cell.ljust(width) for cell, width in zip(words[0], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(words[1], widths[2:], strict=True)]
        lines.append("  ".join(left + right))
        if index == 0:
            lines.append("  ".join("-" * width for width in widths))
    lines += ["", _LEGEND, "", _verdict(report)]
    lines += [f"  {_failure(failure)}" for failure in report.failures]
    return "\n".join(lines)


def render_markdown(report: Report) -> str:
    """The same, to paste into a page."""
    lines = ["# Load test", "", _verdict(report), ""]
    lines.append("| " + " | ".join(_HEADINGS) + " |")
    lines.append("|---|---|" + "---:|" * (len(_HEADINGS) - 2))
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in report.rows]
    lines += ["", _LEGEND]
    if report.failures:
        lines += ["", "## Failures", ""]
        lines += [f"* {_failure(failure)}" for failure in report.failures]
    return "\n".join(lines) + "\n"


def render_html(report: Report) -> str:
    """One page that needs nothing else."""
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
        for row in report.rows
    )
    failed = "".join(f"<li>{html.escape(_failure(failure))}</li>" for failure in report.failures)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Stepdial load test</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1c2330; }}
  .wide {{ overflow-x: auto; }}
  table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
  th, td {{ padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #d9dee7; }}
  th:nth-child(-n+2), td:nth-child(-n+2) {{ text-align: left; }}
  li {{ color: #a3221b; }}
</style>
<h1>Load test</h1>
<p>{html.escape(_verdict(report))}</p>
<div class="wide"><table><thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>
<p>{_LEGEND}</p>
<ul>{failed}</ul>
</html>
"""


def _verdict(report: Report) -> str:
    outcome = "no errors" if report.errors == 0 else _count(report.errors, "ERROR", "ERRORS")
    if report.requests == 0:
        outcome = "NOTHING WAS ANSWERED"
    return (
        f"{report.url}: {_count(report.requests, 'request', 'requests')} "
        f"in {report.elapsed_s:.1f} s from {_count(report.users, 'user', 'users')}, "
        f"{outcome} (mix: {report.mix})."
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _failure(failure: Failure) -> str:
    return f"{failure.count} × {failure.operation}: {failure.message}"


def _cells(row: Row) -> list[str]:
    return [
        row.endpoint,
        row.model,
        str(row.steps),
        str(row.requests),
        str(row.errors),
        _number(row.requests_per_s),
        _number(row.p50_ms),
        _number(row.p95_ms),
        _number(row.p99_ms),
        _number(row.first_token_p50_ms),
        _number(row.first_token_p95_ms),
        _number(row.stream_tokens_per_s),
        _number(row.total_tokens_per_s),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
