"""A report as one page of HTML that needs nothing else: no file, no address, no script.

It deliberately knows nothing of how the numbers were measured.
"""

import html
from collections.abc import Sequence

from loadtest.charts import charts
from loadtest.drawing import draw_svg
from loadtest.report import Report
from loadtest.tables import (
    LEFT,
    LEGEND,
    Cells,
    failure_lines,
    health_line,
    held_line,
    number,
    row_table,
    stage_table,
    verdict,
    verdict_table,
    warnings,
)

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
        (number(report.answered_per_s), "right answers a second", ""),
        (f"{number(slowest)} ms", "p99 of the slowest operation", ""),
    ]
    if report.verdicts:
        met = all(each.met for each in report.verdicts)
        tiles.append((number(report.good_per_s), "good answers a second", ""))
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
