"""The report of a load test: its values, and the JSON that keeps them unrounded.

It deliberately knows nothing of how the numbers were measured, nor of how they are shown.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from loadtest.generator import Health
from loadtest.mix import Operation
from loadtest.objective import Objective, Verdict
from loadtest.outcomes import Failure, Outcome, elapsed_s, group_failures
from loadtest.percentiles import percentile
from loadtest.schedule import Stage
from loadtest.summary import Row, Slice, summarise, timeline
from loadtest.terms import Terms

SCHEMA_VERSION = 2
_HELD_MS = 1.0  # less is how long any request takes to be sent
EVERYTHING = "every rung of every model equally"


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
) -> Report:
    """Sum up what was counted: the outcomes but those of the warm-up; `begin_s` of the epoch."""
    by_stage = [[one for one in outcomes if one.stage == number] for number in range(len(stages))]
    # Until the last answer, but not less than was planned: few requests end before that.
    spans_s = [
        max(elapsed_s(within), stage.duration_s)
        for stage, within in zip(stages, by_stage, strict=True)
    ]
    sent_s = {
        operation: sum(
            span_s
            for stage, span_s in zip(stages, spans_s, strict=True)
            if stage.only in (None, operation)
        )
        for operation in operations
    }
    right = sum(one.error is None for one in outcomes)
    held_ms = [one.held_ms for one in outcomes] if terms.max_in_flight else []
    return Report(
        url=terms.url,
        users=users,
        mix=terms.mix or EVERYTHING,
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
        answered_per_s=_per_s(right, sum(spans_s)),
        good_per_s=_per_s(sum(map(objective.good, outcomes)), sum(spans_s)),
        rows=summarise(outcomes, sent_s, objective),
        stages=[
            _stage(
                *(stage, by_stage[number], span_s, operations, objective),
                carried=_carried(number, begin_s + stage.begin_s, outcomes),
            )
            for number, (stage, span_s) in enumerate(zip(stages, spans_s, strict=True))
        ],
        verdicts=objective.verdicts(outcomes),
        timeline=timeline(outcomes, begin_s),
        failures=group_failures(outcomes),
        health=health,
    )


def _carried(number: int, begin_s: float, outcomes: Sequence[Outcome]) -> int:
    return sum(one.stage < number and one.ended_s > begin_s for one in outcomes)


def _stage(
    stage: Stage,
    within: Sequence[Outcome],
    span_s: float,
    operations: Sequence[Operation],
    objective: Objective,
    carried: int,
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
        rows=summarise(within, dict.fromkeys(planned, span_s), objective),
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
