"""What happened to each request, kept exactly.

It deliberately knows nothing of Locust, whose own statistics round times above 100 ms, nor of how
outcomes are summed up.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from loadtest.mix import Operation

WARM_UP = -1  # the stage of requests that are sent and not counted
REFUSING = (429, 503)  # the answers of a server that may take the same request later


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request; moments are seconds of the epoch, so that processes can be merged.

    Times count from when the request was due: in a closed loop that is when it was sent.
    """

    operation: Operation
    started_s: float
    total_ms: float
    error: str | None = None
    first_token_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()  # between tokens
    tokens: int = 0
    prompt_tokens: int | None = None
    status: int | None = None  # of HTTP; None where none came
    retry_after_s: float | None = None  # when a refused caller was told to come back
    lag_ms: float = 0.0  # from when it was due to when it could be sent
    held_ms: float = 0.0  # while as many were under way as may be
    stage: int = 0
    steps: float | None = None  # that were used
    reason: str | None = None
    expected: float | None = None  # the quality of such answers, as the server states it
    metric: str | None = None  # what that is measured in
    correct: bool | None = None  # None where the right answer is not known

    @property
    def ended_s(self) -> float:
        return self.started_s + self.total_ms / 1e3

    @property
    def refused(self) -> bool:
        """Whether the server was there, and said that it had no time for it now."""
        return self.status in REFUSING

    @property
    def gap_ms(self) -> float | None:
        """The mean time between two tokens."""
        return sum(self.gaps_ms) / len(self.gaps_ms) if self.gaps_ms else None

    def to_wire(self) -> dict[str, Any]:
        """As plain data, to be sent between the processes of a distributed test."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "Outcome":
        """The inverse of `to_wire`."""
        restored = {
            "operation": Operation.from_wire(data["operation"]),
            "gaps_ms": tuple(data["gaps_ms"]),
        }
        return cls(**{**data, **restored})


# In messages: 587 ms, 0.25, and the names of requests, 0b3f9c6e-42.
_NUMBER = re.compile(r"\b(?=\w*\d)[0-9a-f-]{8,}\b|\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Failure:
    """One way in which an operation failed, and how often."""

    operation: str
    message: str
    count: int


def elapsed_s(outcomes: Sequence[Outcome]) -> float:
    """From the first request sent to the last answer received."""
    if not outcomes:
        return 0.0
    begin = min(outcome.started_s for outcome in outcomes)
    return max(outcome.ended_s for outcome in outcomes) - begin


def group_failures(outcomes: Iterable[Outcome]) -> list[Failure]:
    """Failures, the most frequent first. Messages that differ in their numbers are one kind."""
    counted: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], str] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            kind = str(outcome.operation), _NUMBER.sub("#", outcome.error)
            counted[kind] += 1
            if shown.setdefault(kind, outcome.error) != outcome.error:
                # The status, in front, says more as a number.
                status, space, rest = outcome.error.partition(":")
                shown[kind] = status + space + _NUMBER.sub("…", rest)
    return [Failure(kind[0], shown[kind], count) for kind, count in counted.most_common()]


def write_requests(outcomes: Iterable[Outcome], path: Path) -> None:
    """Every request as a line of CSV, in the order in which they were due."""
    names = [each.name for each in fields(Outcome) if each.name not in ("operation", "gaps_ms")]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["endpoint", "model", "ask", *names, "gap_ms"])
        for one in sorted(outcomes, key=lambda outcome: outcome.started_s):
            asked = one.operation
            row = [asked.endpoint, asked.model, str(asked.ask)]
            table.writerow([*row, *(getattr(one, name) for name in names), one.gap_ms])
