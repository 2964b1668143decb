"""A report as tables, for the terminal and in Markdown."""

import textwrap
from collections.abc import Sequence

from loadtest.outcomes import Failure
from loadtest.report import Report, Row, StageReport

Cells = Sequence[Sequence[str]]  # the first row holds the headings
UNLIMITED = 100_000  # columns of what is no terminal
_GAP = "  "

LEGEND = (
    "Times are in milliseconds and count right answers only, from when a request was due (in a "
    "closed loop: sent). refused: 429 or 503, the server is overloaded. first: time to the first "
    "token. gap: time between two tokens. tpot: time per output token, the mean gap of a stream. "
    "tok/s: tokens per second of the median stream, and of all answers together. used: mean step "
    "count. good/s: right answers per second within the time limits of the objective. quality: "
    "share of right answers with its 95 % interval, or the quality that the server states."
)
_ROW_HEADINGS = (
    *("endpoint", "model", "budget", "requests", "errors", "refused", "req/s", "p50", "p95", "p99"),
    *("first p50", "first p99", "gap p50", "gap p99", "tpot p50", "tpot p99"),
    *("tok/s each", "tok/s all"),
    *("used", "quality"),
)
_STAGE_HEADINGS = (
    *("rate/s", "budget", "requests", "errors", "refused", "offered/s", "answered/s", "good/s"),
    *("p50", "p95", "p99", "first p99", "gap p99", "tpot p99"),
    *("used", "quality", "carried", "objective"),
)
_MOST_FAILURES = 20
LEFT = {"endpoint", "model", "budget", "objective", "operation", "limit", "", "what"}


def verdict(report: Report) -> str:
    """The whole test in a sentence."""
    outcome = "no errors" if report.errors == 0 else count(report.errors, "ERROR", "ERRORS")
    if report.refused:
        outcome += f", {report.refused} of them refusals"
    if report.requests == 0:
        outcome = "NOTHING WAS ANSWERED"
    senders = ("sender", "senders") if report.open else ("user", "users")
    return (
        f"{report.url}: {count(report.requests, 'request', 'requests')} "
        f"in {report.elapsed_s:.1f} s from {count(report.users, *senders)}, "
        f"{outcome}, {number(report.answered_per_s)} right answers per second (mix: {report.mix})."
    )


ENOUGH_ANSWERS = 100  # for a p99 that is not simply the slowest of them


def warnings(report: Report) -> list[str]:
    """What makes the figures less reliable."""
    found = []
    if report.ended_early:
        found.append("The test was ended early; its figures cover what was sent until then.")
    if report.health.saturated:
        found.append(
            "THE SENDER WAS SATURATED, so these figures are about it and not about the server: "
            + "; ".join(report.health.complaints)
            + ". Send less, use more --workers, or give the sender a machine of its own."
        )
    carried = max((stage.carried for stage in report.stages), default=0)
    if carried:
        found.append(
            f"Up to {carried} requests of one stage were still unanswered when the next began: "
            "a longer --pause keeps stages apart."
        )
    few = [row for row in report.rows if 0 < row.requests - row.errors < ENOUGH_ANSWERS]
    if few:
        found.append(
            f"{len(few)} of {len(report.rows)} operations have fewer than {ENOUGH_ANSWERS} right "
            "answers. Their p99 is the slowest answer; with fewer than 20, so is their p95. Send "
            "more requests for percentiles that mean something."
        )
    return found


def health_line(report: Report) -> str:
    """How the load was sent."""
    health = report.health
    parts = []
    if health.lag_p99_ms is not None:
        parts.append(
            f"sent {number(health.lag_p50_ms, 2)} ms (median), {number(health.lag_p99_ms, 2)} ms "
            f"(p99), {number(health.lag_max_ms, 2)} ms (most) after they were due"
        )
    if health.cpu_mean is not None:
        busiest = health.cpu_busiest
        seconds = "" if busiest is None else f", {busiest:.0%} in its busiest seconds"
        parts.append(f"a sender used {health.cpu_mean:.0%} of a core{seconds}")
    return "Sender: " + ("; ".join(parts) or "not measured") + "."


def held_line(report: Report) -> list[str]:
    """What the limit of requests under way did, if there was one."""
    if report.max_in_flight is None:
        return []
    return [
        f"At most {report.max_in_flight} requests were in flight at a time: {report.held} of "
        f"{report.requests} waited to be sent (p99 {number(report.held_p99_ms)} ms, longest "
        f"{number(report.held_max_ms)} ms). Latency counts from when a request was due, so it "
        "includes this wait."
    ]


def row_table(rows: Sequence[Row]) -> Cells:
    """A line for each operation, without columns that say nothing."""
    return _without_empty([_ROW_HEADINGS, *map(_row_cells, rows)])


def stage_table(report: Report) -> Cells:
    """A line for each stage, or for each operation of it."""
    lines = [
        _stage_cells(stage, row, first=at == 0)
        for stage in report.stages
        for at, row in enumerate(row for row in stage.rows if row.requests)
    ]
    return _without_empty([_STAGE_HEADINGS, *lines])


def verdict_table(report: Report) -> Cells:
    """Each limit of the objective beside what was measured in the whole test."""
    lines = [
        [
            one.limit,
            _never(report) if one.value is None else number(one.value, 3),
            "met" if one.met else "MISSED",
        ]
        for one in report.verdicts
    ]
    return [("limit", "measured", ""), *lines]


def _never(report: Report) -> str:
    """Why there is no value: failed requests are the slowest there are."""
    return f"never ({report.errors} failed)" if report.errors else "nothing"


def render_text(report: Report, width: int = UNLIMITED) -> str:
    """For a terminal of so many columns."""
    parts = [text_table(row_table(report.rows), width)]
    if len(report.stages) > 1:
        parts += ["", text_table(stage_table(report), width)]
    parts += ["", wrapped(LEGEND, width), "", wrapped(verdict(report), width), report.arrivals]
    if report.verdicts:
        parts += ["", text_table(verdict_table(report), width)]
        parts.append(f"good: {report.good_per_s:.2f} per second")
    parts += [wrapped(f"  {each}", width) for each in failure_lines(report.failures)]
    parts += ["", *(wrapped(each, width) for each in (*held_line(report), health_line(report)))]
    parts += [wrapped(f"WARNING: {each}", width) for each in warnings(report)]
    return "\n".join(parts)


def render_markdown(report: Report) -> str:
    """The same, to paste into a page."""
    parts = ["# Load test", verdict(report), report.arrivals]
    parts += [f"**{each}**" for each in warnings(report)]
    if report.verdicts:
        parts += ["## Objective", markdown_table(verdict_table(report))]
        parts.append(f"Good answers: {report.good_per_s:.2f} a second.")
    parts += ["## Operations", markdown_table(row_table(report.rows))]
    if len(report.stages) > 1:
        parts += ["## Stages", markdown_table(stage_table(report))]
    parts += [LEGEND, *held_line(report), health_line(report)]
    if report.failures:
        listed = "\n".join(f"* {each}" for each in failure_lines(report.failures))
        parts += ["## Failures", listed]
    return "\n\n".join(parts) + "\n"


def text_table(cells: Cells, width: int = UNLIMITED) -> str:
    """Columns side by side; those that find no room come below, beside the first ones again."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # The first columns, up to three, say what a line is about.
    naming = max((at + 1 for at in range(min(3, len(widths))) if cells[0][at] in LEFT), default=1)
    blocks = [[*range(naming)]]
    for at in range(naming, len(widths)):
        if len(blocks[-1]) > naming and _extent(widths, [*blocks[-1], at]) > width:
            blocks.append([*range(naming)])
        blocks[-1].append(at)
    return "\n\n".join(_block(cells, widths, shown) for shown in blocks)


def wrapped(text: str, width: int) -> str:
    """A sentence in lines that a terminal has room for; what goes on is indented as it began."""
    indent = " " * (len(text) - len(text.lstrip()))
    lines = textwrap.wrap(
        text.strip(), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
    return "\n".join(lines)


def _extent(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + len(_GAP) * (len(shown) - 1)


def _block(cells: Cells, widths: Sequence[int], shown: Sequence[int]) -> str:
    lines = []
    for index, row in enumerate(cells):
        padded = [
            row[at].ljust(widths[at]) if cells[0][at] in LEFT else row[at].rjust(widths[at])
            for at in shown
        ]
        lines.append(_GAP.join(padded))
        if index == 0:
            lines.append(_GAP.join("-" * widths[at] for at in shown))
    return "\n".join(lines)


def markdown_table(cells: Cells) -> str:
    """The same in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|" + "".join("---|" if name in LEFT else "---:|" for name in cells[0]))
    return "\n".join(lines)


def number(value: float | None, digits: int = 1) -> str:
    """A value with the digits that mean something; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.0f}"


def count(amount: int, one: str, many: str) -> str:
    """An amount with its noun."""
    return f"{amount} {one if amount == 1 else many}"


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Each way in which an operation failed, the most frequent first; not endlessly many."""
    lines = [f"{one.count} × {one.operation}: {one.message}" for one in failures[:_MOST_FAILURES]]
    if rest := failures[_MOST_FAILURES:]:
        lines.append(f"{sum(one.count for one in rest)} × of {len(rest)} other kinds")
    return lines


def _row_cells(row: Row) -> list[str]:
    return [
        *(row.endpoint, row.model, row.ask, str(row.requests), str(row.errors)),
        str(row.refused or "–"),
        *(number(row.requests_per_s), number(row.p50_ms), number(row.p95_ms), number(row.p99_ms)),
        *(number(row.first_token_p50_ms), number(row.first_token_p99_ms)),
        *(number(row.gap_p50_ms, 2), number(row.gap_p99_ms, 2)),
        *(number(row.per_token_p50_ms, 2), number(row.per_token_p99_ms, 2)),
        *(number(row.stream_tokens_per_s), number(row.total_tokens_per_s)),
        *(number(row.steps_mean, 2), quality(row)),
    ]


def _stage_cells(stage: StageReport, row: Row, first: bool) -> list[str]:
    """What is said of the whole stage stands in its first line only."""
    alone = row.requests == stage.requests
    return [
        *(number(stage.rate_per_s), f"{row.endpoint} {row.model} {row.ask}"),
        *(str(row.requests), str(row.errors), str(row.refused or "–")),
        number(stage.offered_per_s if alone else row.requests / max(stage.duration_s, 1e-9)),
        number(stage.answered_per_s if alone else row.requests_per_s),
        number(row.good_per_s),
        *(number(row.p50_ms), number(row.p95_ms), number(row.p99_ms)),
        *(number(row.first_token_p99_ms), number(row.gap_p99_ms, 2)),
        number(row.per_token_p99_ms, 2),
        *(number(row.steps_mean, 2), quality(row)),
        str(stage.carried) if stage.carried and first else "",
        ("met" if stage.met else "MISSED") if stage.verdicts and first else "",
    ]


def quality(row: Row) -> str:
    """How many of the known answers were right; else what the server states."""
    if row.accuracy is not None and row.accuracy_interval is not None:
        low, high = row.accuracy_interval
        return f"{row.accuracy:.3f} ({low:.3f}–{high:.3f})"
    return "–" if row.expected is None else f"{row.expected:.3f} stated"


def _without_empty(cells: list[Sequence[str]]) -> Cells:
    kept = [
        index
        for index in range(len(cells[0]))
        if len(cells) == 1 or any(row[index] not in ("–", "") for row in cells[1:])
    ]
    return [[row[index] for index in kept] for row in cells]
