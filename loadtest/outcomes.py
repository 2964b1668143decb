"""The outcome of each request, kept exactly; percentiles; and whether the sender kept up.

Locust's own statistics round times above 100 ms, so they are not used.
"""

import csv
import math
import re
import statistics
import time
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


# Percentiles and shares of what was measured, with how sure they are.


_Z = 1.96  # of 95 %
_BATCHES = 10
_T = 2.262  # of 95 %, for the spread of so many batches


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: a value that was really measured."""
    return ranked(sorted(values), percent)


def ranked(ordered: Sequence[float], percent: float) -> float | None:
    """The same of values in ascending order."""
    if not ordered:
        return None
    # Rounded first, since 0.999 * 1000 is more than 999 in binary.
    rank = math.ceil(round(percent / 100 * len(ordered), 9))
    return ordered[max(rank, 1) - 1]


def percentile_interval(ordered: Sequence[float], percent: float) -> tuple[float, float] | None:
    """Between which measured values the true percentile lies, at 95 %.

    From the ranks alone, whatever the distribution, for values that do not depend on each other.
    None where there are too few values to say.
    """
    share, count = percent / 100, len(ordered)
    spread = _Z * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    if low < 0 or high >= count:
        return None
    return ordered[low], ordered[high]


def share_interval(hits: float, count: int) -> tuple[float, float] | None:
    """Wilson's interval of a share at 95 %."""
    if not count:
        return None
    share, square = hits / count, _Z**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    spread = math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    spread *= _Z / (1 + square / count)
    return max(middle - spread, 0.0), min(middle + spread, 1.0)


def mean(values: Sequence[float]) -> float | None:
    """The mean, or infinity if one of them is infinite."""
    return statistics.fmean(values) if values else None


def is_sure(values: Sequence[float], bound: float) -> bool:
    """Whether the mean of values in order of time is surely on its side of a bound, at 95 %.

    Requests of one moment share its queue, so the spread is that of batches of neighbours. Shares
    of 0 and 1 can only be told from the bound by how many there are.
    """
    middle = statistics.fmean(values)
    if not math.isfinite(middle):
        return True
    if set(values) <= {0.0, 1.0}:
        low, high = share_interval(round(sum(values)), len(values)) or (0.0, 1.0)
        if low <= bound <= high:
            return False
    size = len(values) // _BATCHES
    if not size:
        return False
    means = [statistics.fmean(values[at : at + size]) for at in range(0, size * _BATCHES, size)]
    spread = _T * statistics.stdev(means) / math.sqrt(_BATCHES)
    return abs(middle - bound) > spread


# The machine that sends the load: whether it kept up, so that its own limits are not mistaken for
# those of the server.


BUSY_SHARE = 0.9  # of a core; a process that sends has no more than one
BUSY_S = 5  # for so many seconds on end


@dataclass(frozen=True, slots=True)
class Generator:
    """One process that sends: its processor time as a share of a core."""

    cpu_mean: float
    cpu_busiest: float | None  # the greatest mean of BUSY_S seconds; None: it was shorter

    def to_wire(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "Generator":
        """The inverse of `to_wire`."""
        return cls(**data)


class Gauge:
    """Measures the processor time of this process, second by second."""

    def __init__(self) -> None:
        self._marks = [(time.perf_counter(), time.process_time())]

    def mark(self) -> None:
        """A second is over."""
        self._marks.append((time.perf_counter(), time.process_time()))

    def read(self) -> Generator:
        """What was measured so far."""
        marks = [*self._marks, (time.perf_counter(), time.process_time())]
        spans = zip(marks, marks[BUSY_S:], strict=False)
        busiest = max((_share(*span) for span in spans), default=None)
        return Generator(_share(marks[0], marks[-1]), busiest)


@dataclass(frozen=True, slots=True)
class Health:
    """How well the load was sent, and what is wrong with it; `lag` is from due to sent."""

    planned: int | None  # None in a closed loop
    sent: int | None  # None: the test is still going on
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None
    cpu_mean: float | None  # of the busiest process
    cpu_busiest: float | None
    processes: int
    complaints: Sequence[str]

    @property
    def saturated(self) -> bool:
        return bool(self.complaints)


def judge(
    lags_ms: Sequence[float],
    planned: int | None,
    sent: int | None,
    lost: int,
    generators: Sequence[Generator],
    max_lag_ms: float,
) -> Health:
    """Whether the figures of a test are about the server or about what sent the load.

    `sent` is None while requests are on their way; `lost` processes never told their last ones.
    """
    open_loop = planned is not None
    lag_p99_ms = percentile(lags_ms, 99) if open_loop else None
    known = [each.cpu_busiest for each in generators if each.cpu_busiest is not None]
    busiest = max(known, default=None)
    complaints = []
    if lag_p99_ms is not None and lag_p99_ms > max_lag_ms:
        complaints.append(
            f"1 % of the requests were sent more than {lag_p99_ms:.0f} ms after they were due "
            f"(limit {max_lag_ms:g} ms)"
        )
    if busiest is not None and busiest >= BUSY_SHARE:
        complaints.append(f"a process that sends used {busiest:.0%} of a core")
    if lost:
        complaints.append(f"{lost} of the processes that send were lost, with what they had seen")
    if planned is not None and sent is not None and sent < planned:
        complaints.append(f"{planned - sent} of {planned} planned requests were never sent")
    return Health(
        planned=planned,
        sent=sent,
        lag_p50_ms=percentile(lags_ms, 50) if open_loop else None,
        lag_p99_ms=lag_p99_ms,
        lag_max_ms=max(lags_ms, default=None) if open_loop else None,
        cpu_mean=max((each.cpu_mean for each in generators), default=None),
        cpu_busiest=busiest,
        processes=len(generators),
        complaints=complaints,
    )


def _share(begin: tuple[float, float], end: tuple[float, float]) -> float:
    wall_s = end[0] - begin[0]
    return (end[1] - begin[1]) / wall_s if wall_s > 0 else 0.0
