"""The report of a load test: its values, and the JSON that keeps them unrounded."""

import json
import math
import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.mix import Operation
from loadtest.objective import Objective, Verdict
from loadtest.outcomes import (
    Failure,
    Health,
    Outcome,
    elapsed_s,
    group_failures,
    percentile,
    percentile_interval,
    ranked,
    share_interval,
)
from loadtest.schedule import Stage, Terms

# Outcomes in numbers: a row for each operation, of the whole test or of one stage of it.


CURVE = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.9, 100.0)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One operation in numbers. Times are of right answers only; None where there was none."""

    endpoint: str
    model: str
    ask: str
    steps: int | None  # that were asked for
    requests: int
    errors: int
    refused: int  # of the errors: 429 and 503
    requests_per_s: float  # right answers, while it was sent and until the last had come
    good: int  # right and within every time limit of the objective
    good_per_s: float
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    p50_interval_ms: Interval | None
    p99_interval_ms: Interval | None
    curve_ms: Sequence[float]  # the percentiles of CURVE
    first_token_p50_ms: float | None
    first_token_p95_ms: float | None
    first_token_p99_ms: float | None
    gap_p50_ms: float | None
    gap_p95_ms: float | None
    gap_p99_ms: float | None
    per_token_p50_ms: float | None  # of each stream: its mean time between tokens
    per_token_p95_ms: float | None
    per_token_p99_ms: float | None
    stream_tokens_per_s: float | None  # the median stream
    total_tokens_per_s: float | None  # all answers together
    prompt_tokens: float | None  # mean
    tokens: float | None  # mean of the answers
    steps_mean: float | None  # that were used
    steps_used: dict[str, int]  # how many answers took how many steps
    reasons: dict[str, int]  # what decided, in the words of the server
    known: int  # answers whose right label is known
    accuracy: float | None  # of those
    accuracy_interval: Interval | None
    expected: float | None  # mean quality of such answers, as the server states it
    metric: str | None  # what that is measured in


@dataclass(frozen=True, slots=True)
class Slice:
    """A second of the test."""

    at_s: float
    due: int
    answered: int
    errors: int
    p50_ms: float | None  # of the requests that were due in it
    p99_ms: float | None


def summarise(
    outcomes: Sequence[Outcome],
    spans_s: Mapping[Operation, float],
    objective: Objective,
    labelled: int | None = None,
) -> list[Row]:
    """A row for every operation with the time in which it was sent, never answered ones too.

    `labelled` texts were sent again and again; their answers tell no more than so many.
    """
    by_operation: dict[Operation, list[Outcome]] = {operation: [] for operation in spans_s}
    for outcome in outcomes:
        by_operation[outcome.operation].append(outcome)
    ordered = sorted(by_operation, key=lambda each: each.place)
    return [_row(each, by_operation[each], spans_s[each], objective, labelled) for each in ordered]


def timeline(outcomes: Sequence[Outcome], begin_s: float) -> list[Slice]:
    """Second by second; `begin_s` is that of the test, in seconds of the epoch."""
    if not outcomes:
        return []
    due: dict[int, list[Outcome]] = {}
    answered: Counter[int] = Counter()
    for outcome in outcomes:
        due.setdefault(int(outcome.started_s - begin_s), []).append(outcome)
        answered[int(outcome.ended_s - begin_s)] += outcome.error is None
    slices = []
    for second in range(min(due), max(*due, *answered) + 1):
        here = due.get(second, [])
        times = sorted(one.total_ms for one in here if one.error is None)
        slices.append(
            Slice(
                at_s=float(second),
                due=len(here),
                answered=answered[second],
                errors=sum(one.error is not None for one in here),
                p50_ms=ranked(times, 50),
                p99_ms=ranked(times, 99),
            )
        )
    return slices


def _row(
    operation: Operation,
    outcomes: list[Outcome],
    duration_s: float,
    objective: Objective,
    labelled: int | None,
) -> Row:
    right = [outcome for outcome in outcomes if outcome.error is None]
    total_ms = sorted(outcome.total_ms for outcome in right)
    first_ms = sorted(one.first_token_ms for one in right if one.first_token_ms is not None)
    gaps_ms = sorted(gap for one in right for gap in one.gaps_ms)
    per_token_ms = sorted(one.gap_ms for one in right if one.gap_ms is not None)
    rates = [1e3 / each for each in per_token_ms if each]
    tokens = sum(outcome.tokens for outcome in right)
    known = [one.correct for one in right if one.correct is not None]
    accuracy = sum(known) / len(known) if known else None
    told = min(len(known), labelled or len(known))
    used = Counter(one.steps for one in right if one.steps is not None)
    good = sum(map(objective.good, outcomes))
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Row(
        endpoint=operation.endpoint,
        model=operation.model,
        ask=str(operation.ask),
        steps=operation.ask.steps,
        requests=len(outcomes),
        errors=len(outcomes) - len(right),
        refused=sum(outcome.refused for outcome in outcomes),
        requests_per_s=len(right) * per_s,
        good=good,
        good_per_s=good * per_s,
        mean_ms=statistics.fmean(total_ms) if total_ms else None,
        p50_ms=ranked(total_ms, 50),
        p95_ms=ranked(total_ms, 95),
        p99_ms=ranked(total_ms, 99),
        p50_interval_ms=percentile_interval(total_ms, 50),
        p99_interval_ms=percentile_interval(total_ms, 99),
        curve_ms=[total_ms[0], *(ranked(total_ms, each) or 0.0 for each in CURVE[1:])]
        if total_ms
        else [],
        first_token_p50_ms=ranked(first_ms, 50),
        first_token_p95_ms=ranked(first_ms, 95),
        first_token_p99_ms=ranked(first_ms, 99),
        gap_p50_ms=ranked(gaps_ms, 50),
        gap_p95_ms=ranked(gaps_ms, 95),
        gap_p99_ms=ranked(gaps_ms, 99),
        per_token_p50_ms=ranked(per_token_ms, 50),
        per_token_p95_ms=ranked(per_token_ms, 95),
        per_token_p99_ms=ranked(per_token_ms, 99),
        stream_tokens_per_s=statistics.median(rates) if rates else None,
        total_tokens_per_s=tokens * per_s if tokens else None,
        prompt_tokens=_mean([one.prompt_tokens for one in right]),
        tokens=tokens / len(right) if tokens else None,
        steps_mean=_mean([one.steps for one in right]),
        steps_used={f"{steps:g}": count for steps, count in sorted(used.items())},
        reasons=dict(Counter(one.reason for one in right if one.reason is not None)),
        known=len(known),
        accuracy=accuracy,
        accuracy_interval=None if accuracy is None else share_interval(accuracy * told, told),
        expected=_mean([one.expected for one in right]),
        metric=next((one.metric for one in right if one.metric), None),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


SCHEMA_VERSION = 2
_HELD_MS = 1.0  # less is how long any request takes to be sent
EVERYTHING = "every step count of every model equally"


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stretch of the test; `carried` requests of earlier ones were still unanswered."""

    begin_s: float
    duration_s: float
    rate_per_s: float | None  # planned
    only: str | None
    requests: int
    errors: int
    offered_per_s: float
    answered_per_s: float  # right answers, until the last had come
    good_per_s: float
    carried: int
    verdicts: Sequence[Verdict]
    rows: Sequence[Row]

    @property
    def met(self) -> bool:
        """Whether every limit of the objective was kept."""
        return all(verdict.met for verdict in self.verdicts)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is printed or kept of one load test."""

    url: str
    users: int
    mix: str
    texts: str
    arrivals: str
    open: bool
    seed: int
    objective: str
    finished_at: str
    elapsed_s: float
    ended_early: bool  # before all that was planned was sent
    max_in_flight: int | None
    held: int  # requests that waited to be sent since so many were under way
    held_p99_ms: float | None  # of all requests
    held_max_ms: float | None
    answered_per_s: float  # right answers, without the time between stages
    good_per_s: float
    rows: Sequence[Row]
    stages: Sequence[StageReport]
    verdicts: Sequence[Verdict]
    timeline: Sequence[Slice]
    failures: Sequence[Failure]
    health: Health

    @property
    def requests(self) -> int:
        return sum(row.requests for row in self.rows)

    @property
    def errors(self) -> int:
        return sum(row.errors for row in self.rows)

    @property
    def refused(self) -> int:
        return sum(row.refused for row in self.rows)

    @property
    def passed(self) -> bool:
        """Something was answered, nothing went wrong, and the objective was met if there was one.

        With an objective that bears with errors, errors alone are no failure.
        """
        bearable = "error_share" in self.objective
        return (
            self.requests > 0
            and (self.errors == 0 or bearable)
            and all(verdict.met for verdict in self.verdicts)
        )


def build_report(
    terms: Terms,
    users: int,
    objective: Objective,
    operations: Sequence[Operation],
    stages: Sequence[Stage],
    begin_s: float,
    outcomes: Sequence[Outcome],
    health: Health,
    ended_early: bool = False,
    labelled: int | None = None,
) -> Report:
    """Sum up what was counted: the outcomes but those of the warm-up; `begin_s` of the epoch."""
    by_stage = [[one for one in outcomes if one.stage == number] for number in range(len(stages))]
    # Until the last answer, but not less than was planned: few requests end before that.
    stretches = [
        _stretch(begin_s + stage.begin_s, stage.duration_s, within)
        for stage, within in zip(stages, by_stage, strict=True)
    ]
    sent_s = {
        operation: _covered_s(
            stretch
            for stage, stretch in zip(stages, stretches, strict=True)
            if stage.only in (None, operation)
        )
        for operation in operations
    }
    whole_s = _covered_s(stretches)
    right = sum(one.error is None for one in outcomes)
    held_ms = [one.held_ms for one in outcomes] if terms.max_in_flight else []
    return Report(
        url=terms.url,
        users=users,
        mix=terms.mix or EVERYTHING,
        texts=terms.texts,
        arrivals=terms.arrivals,
        open=terms.open,
        seed=terms.seed,
        objective=terms.objective,
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        elapsed_s=elapsed_s(outcomes),
        ended_early=ended_early,
        max_in_flight=terms.max_in_flight,
        held=sum(one.held_ms >= _HELD_MS for one in outcomes),
        held_p99_ms=percentile(held_ms, 99),
        held_max_ms=max(held_ms, default=None),
        answered_per_s=_per_s(right, whole_s),
        good_per_s=_per_s(sum(map(objective.good, outcomes)), whole_s),
        rows=summarise(outcomes, sent_s, objective, labelled),
        stages=[
            _stage(
                *(stage, by_stage[number], end_s - from_s, operations, objective),
                carried=_carried(number, from_s, outcomes),
                labelled=labelled,
            )
            for number, (stage, (from_s, end_s)) in enumerate(zip(stages, stretches, strict=True))
        ],
        verdicts=objective.verdicts(outcomes),
        timeline=timeline(outcomes, begin_s),
        failures=group_failures(outcomes),
        health=health,
    )


def _stretch(begin_s: float, duration_s: float, within: Sequence[Outcome]) -> Interval:
    """From when to when a stage was sent and answered, in seconds of the epoch."""
    last_s = max((one.ended_s for one in within), default=begin_s)
    return begin_s, max(begin_s + duration_s, last_s)


def _covered_s(stretches: Iterable[Interval]) -> float:
    """How long they are together: what is late in one stage goes on beside the next."""
    covered_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(stretches):
        covered_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered_s


def _carried(number: int, begin_s: float, outcomes: Sequence[Outcome]) -> int:
    return sum(one.stage < number and one.ended_s > begin_s for one in outcomes)


def _stage(
    stage: Stage,
    within: Sequence[Outcome],
    span_s: float,
    operations: Sequence[Operation],
    objective: Objective,
    carried: int,
    labelled: int | None,
) -> StageReport:
    right = sum(one.error is None for one in within)
    planned = [stage.only] if stage.only else operations
    return StageReport(
        begin_s=stage.begin_s,
        duration_s=stage.duration_s,
        rate_per_s=stage.rate_per_s,
        only=str(stage.only) if stage.only else None,
        requests=len(within),
        errors=len(within) - right,
        offered_per_s=_per_s(len(within), stage.duration_s),
        answered_per_s=_per_s(right, span_s),
        good_per_s=_per_s(sum(map(objective.good, within)), span_s),
        carried=carried,
        verdicts=objective.verdicts(within),
        rows=summarise(within, dict.fromkeys(planned, span_s), objective, labelled),
    )


def _per_s(count: int, span_s: float) -> float:
    return count / span_s if span_s > 0 else 0.0


def render_json(report: Report) -> str:
    """Unrounded numbers, and the machine that sent the load."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "requests": report.requests,
        "errors": report.errors,
        "refused": report.refused,
        "passed": report.passed,
        "saturated": report.health.saturated,
        "client": {"platform": platform.platform(), "cores": os.cpu_count()},
        **asdict(report),
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


# A report that was kept, read back and checked: a file may have been cut, edited, or be another.


FIGURES = (
    *("requests_per_s", "errors", "refused", "p50_ms", "p95_ms", "p99_ms"),
    *("first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms"),
    *("per_token_p50_ms", "per_token_p99_ms"),
    *("steps_mean", "accuracy"),
)
INTERVALS = ("p50_interval_ms", "p99_interval_ms", "accuracy_interval")
TERMS = ("url", "mix", "texts", "arrivals", "users", "seed", "objective", "client")


class KeptError(ValueError):
    """The file is no report that can be read; the text says which and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class KeptRow:
    """One operation; of figures and intervals only those that were measured."""

    name: str
    requests: float
    figures: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class KeptStage:
    """One stretch of the test."""

    rate_per_s: float | None
    offered_per_s: float
    rows: tuple[KeptRow, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """As much of a report as a comparison needs."""

    terms: Mapping[str, Any]
    saturated: bool
    rows: tuple[KeptRow, ...]
    stages: tuple[KeptStage, ...]


def read_report(path: Path) -> Kept:
    """A report.json of this version, or that of a folder."""
    file = path / "report.json" if path.is_dir() else path
    try:
        record = _object(json.loads(file.read_text(encoding="utf-8")), "the report")
        version = _of(record, "schema_version")
    except RecursionError:
        raise KeptError(f"{file} is no report of a load test: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise KeptError(f"{file} is no report of a load test: {error}") from None
    if version != SCHEMA_VERSION:
        raise KeptError(
            f"{file} has schema version {version!r}, not {SCHEMA_VERSION}: run that test again."
        )
    try:
        return _kept(record)
    except ValueError as error:
        raise KeptError(f"{file} is a damaged report: {error}. Run that test again.") from None


def _kept(record: dict[str, Any]) -> Kept:
    saturated = _of(record, "saturated")
    if not isinstance(saturated, bool):
        raise ValueError(f"saturated is {_short(saturated)}, neither true nor false")
    return Kept(
        terms={name: record.get(name) for name in TERMS},
        saturated=saturated,
        rows=_rows(record, "the report"),
        stages=tuple(
            _kept_stage(stage, f"stage {at}") for at, stage in enumerate(_list(record, "stages"), 1)
        ),
    )


def _kept_stage(value: Any, where: str) -> KeptStage:
    stage = _object(value, where)
    rate, offered = _of(stage, "rate_per_s"), _of(stage, "offered_per_s")
    return KeptStage(
        rate_per_s=None if rate is None else _number(rate, f"rate_per_s of {where}"),
        offered_per_s=_number(offered, f"offered_per_s of {where}"),
        rows=_rows(stage, where),
    )


def _rows(record: dict[str, Any], where: str) -> tuple[KeptRow, ...]:
    return tuple(
        _kept_row(row, f"row {at} of {where}") for at, row in enumerate(_list(record, "rows"), 1)
    )


def _kept_row(value: Any, where: str) -> KeptRow:
    row = _object(value, where)
    words = [_of(row, name) for name in ("endpoint", "model", "ask")]
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"endpoint, model and ask of {where} are {_short(words)}, not all words")
    return KeptRow(
        name=" ".join(words),
        requests=_number(_of(row, "requests"), f"requests of {where}"),
        figures={
            name: _number(row[name], f"{name} of {where}")
            for name in FIGURES
            if row.get(name) is not None
        },
        intervals={
            name: _pair(row[name], f"{name} of {where}")
            for name in INTERVALS
            if row.get(name) is not None
        },
    )


def _of(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"it has no {name}")
    return record[name]


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_short(value)}, no object")
    return value


def _list(record: dict[str, Any], name: str) -> list[Any]:
    found = _of(record, name)
    if not isinstance(found, list):
        raise ValueError(f"{name} is {_short(found)}, no list")
    return found


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {_short(value)}, no number")
    if value < 0:
        raise ValueError(f"{what} is {_short(value)}, below 0")
    return value


def _pair(value: Any, what: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{what} is {_short(value)}, no pair of numbers")
    return _number(value[0], what), _number(value[1], what)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
