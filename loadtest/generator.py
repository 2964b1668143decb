"""The machine that sends the load: whether it kept up, so that its own limits are not mistaken
for those of the server.

It deliberately knows nothing of what was sent.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.percentiles import percentile

BUSY_SHARE = 0.9  # of a core; a process that sends has no more than one
BUSY_S = 5  # for so many seconds on end


@dataclass(frozen=True, slots=True)
class Generator:
    """One process that sends: its processor time as a share of a core."""

    cpu_mean: float
    cpu_busiest: float  # the greatest mean of BUSY_S seconds

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
        spans = [*zip(marks, marks[BUSY_S:], strict=False)] or [(marks[0], marks[-1])]
        return Generator(_share(marks[0], marks[-1]), max(_share(*span) for span in spans))


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
    busiest = max((each.cpu_busiest for each in generators), default=None)
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
