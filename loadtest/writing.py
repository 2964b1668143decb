"""Keeps a report in a folder, in every form.

It deliberately knows nothing of what the forms look like.
"""

from pathlib import Path

from loadtest.charts import charts
from loadtest.drawing import draw_png
from loadtest.page import render_html
from loadtest.report import Report, render_json
from loadtest.tables import render_markdown, verdict


def write_report(report: Report, folder: Path) -> None:
    """Keep the report as report.json, report.md, report.html and report.png in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(render_json(report), encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report), encoding="utf-8")
    draw_png(verdict(report), charts(report), folder / "report.png")
