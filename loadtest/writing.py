"""Keeps a report in a folder, in every form.

It deliberately knows nothing of what the forms look like.
"""

from collections.abc import Sequence
from pathlib import Path

from loadtest.charts import charts
from loadtest.drawing import draw_png
from loadtest.files import write_text, write_whole
from loadtest.outcomes import Outcome, write_requests
from loadtest.page import render_html
from loadtest.report import Report, render_json
from loadtest.tables import render_markdown, verdict


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
