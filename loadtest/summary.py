"""Outcomes in numbers: a row for each operation, of the whole test or of one stage of it.

It deliberately knows nothing of how numbers are shown.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.mix import Operation
from loadtest.objective import Objective
from loadtest.outcomes import Outcome
from loadtest.percentiles import percentile_interval, ranked, share_interval

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
    outcomes: Sequence[Outcome], spans_s: Mapping[Operation, float], objective: Objective
) -> list[Row]:
    """A row for every operation with the time in which it was sent, never answered ones too."""
    by_operation: dict[Operation, list[Outcome]] = {operation: [] for operation in spans_s}
    for outcome in outcomes:
        by_operation[outcome.operation].append(outcome)
    ordered = sorted(by_operation, key=lambda each: each.place)
    return [_row(each, by_operation[each], spans_s[each], objective) for each in ordered]


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
    operation: Operation, outcomes: list[Outcome], duration_s: float, objective: Objective
) -> Row:
    right = [outcome for outcome in outcomes if outcome.error is None]
    total_ms = sorted(outcome.total_ms for outcome in right)
    first_ms = sorted(one.first_token_ms for one in right if one.first_token_ms is not None)
    gaps_ms = sorted(gap for one in right for gap in one.gaps_ms)
    per_token_ms = sorted(one.gap_ms for one in right if one.gap_ms is not None)
    rates = [1e3 / each for each in per_token_ms if each]
    tokens = sum(outcome.tokens for outcome in right)
    known = [one.correct for one in right if one.correct is not None]
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
        accuracy=sum(known) / len(known) if known else None,
        accuracy_interval=share_interval(sum(known), len(known)),
        expected=_mean([one.expected for one in right]),
        metric=next((one.metric for one in right if one.metric), None),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
