"""What happened to each request, kept exactly, and its summary per operation.

It deliberately knows nothing of Locust, whose own statistics round times above 100 ms, nor of
how a summary is shown.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.mix import Operation


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request; moments are seconds of the epoch, so that processes can be merged."""

    operation: Operation
    started_s: float
    total_ms: float
    error: str | None = None
    first_token_ms: float | None = None
    tokens: int = 0
    stream_tokens_per_s: float | None = None  # between the first and the last token

    def to_wire(self) -> dict[str, Any]:
        """As plain data, to be sent between the processes of a distributed test."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "Outcome":
        """The inverse of `to_wire`."""
        return cls(**{**data, "operation": Operation(**data["operation"])})


@dataclass(frozen=True, slots=True)
class Row:
    """One operation in numbers. Times are of right answers only; None where there was none."""

    endpoint: str
    model: str
    steps: int
    requests: int
    errors: int
    requests_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    first_token_p50_ms: float | None
    first_token_p95_ms: float | None
    stream_tokens_per_s: float | None  # the median stream
    total_tokens_per_s: float | None  # all streams together


@dataclass(frozen=True, slots=True)
class Failure:
    """One way in which an operation failed, and how often."""

    operation: Operation
    message: str
    count: int


def elapsed_s(outcomes: Sequence[Outcome]) -> float:
    """From the first request sent to the last answer received."""
    if not outcomes:
        return 0.0
    begin = min(outcome.started_s for outcome in outcomes)
    return max(outcome.started_s + outcome.total_ms / 1e3 for outcome in outcomes) - begin


def summarise(outcomes: Sequence[Outcome], planned: Iterable[Operation]) -> list[Row]:
    """A row for every planned operation, those that were never answered too."""
    by_operation: dict[Operation, list[Outcome]] = {operation: [] for operation in planned}
    for outcome in outcomes:
        by_operation.setdefault(outcome.operation, []).append(outcome)
    duration_s = elapsed_s(outcomes)
    ordered = sorted(by_operation, key=lambda each: (each.endpoint, each.model, each.steps))
    return [_row(operation, by_operation[operation], duration_s) for operation in ordered]


def group_failures(outcomes: Iterable[Outcome]) -> list[Failure]:
    """Failures, the most frequent first."""
    counted = Counter(
        (outcome.operation, outcome.error) for outcome in outcomes if outcome.error is not None
    )
    return [
        Failure(operation, message, count) for (operation, message), count in counted.most_common()
    ]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: a value that was really measured."""
    if not values:
        return None
    ordered = sorted(values)
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


def _row(operation: Operation, outcomes: list[Outcome], duration_s: float) -> Row:
    right = [outcome for outcome in outcomes if outcome.error is None]
    total_ms = [outcome.total_ms for outcome in right]
    first_ms = [each.first_token_ms for each in right if each.first_token_ms is not None]
    rates = [each.stream_tokens_per_s for each in right if each.stream_tokens_per_s is not None]
    tokens = sum(outcome.tokens for outcome in right)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Row(
        endpoint=operation.endpoint,
        model=operation.model,
        steps=operation.steps,
        requests=len(outcomes),
        errors=len(outcomes) - len(right),
        requests_per_s=len(right) * per_s,
        p50_ms=percentile(total_ms, 50),
        p95_ms=percentile(total_ms, 95),
        p99_ms=percentile(total_ms, 99),
        first_token_p50_ms=percentile(first_ms, 50),
        first_token_p95_ms=percentile(first_ms, 95),
        stream_tokens_per_s=statistics.median(rates) if rates else None,
        total_tokens_per_s=tokens * per_s if tokens else None,
    )
