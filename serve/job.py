"""A job: what the scheduler needs to know of one request, and nothing else of it.

It deliberately knows neither tokens nor tensors: only where the work belongs, how long its rows
are, and how many cached positions it may come to hold. The request itself rides along as `work`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal, TypeVar

WorkT = TypeVar("WorkT")

Kind = Literal["classify", "generate", "search"]


@dataclass(frozen=True, slots=True)
class LaneKey:
    """Work that may share a batch: one rung of one model."""

    model: str
    kind: Kind
    steps: int
    threshold: float | None = None  # of a classification: how sure an early answer must be


class State(Enum):
    """Where a job stands. A job ends exactly once."""

    QUEUED = "queued"  # no part of it has run
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Job(Generic[WorkT]):
    """One request in the scheduler."""

    lane: LaneKey
    work: WorkT
    lengths: tuple[int, ...]  # tokens of each row; a generation has one row, its prompt
    positions: int = 0  # the most positions that are held in memory for a generation or search
    may_pad: bool = True  # whether a row may be padded to the length of others
    state: State = State.QUEUED
    number: int = -1  # order of arrival, given by the scheduler
    queued_s: float = 0.0
    started_s: float | None = None
    rows_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows_left = len(self.lengths)


@dataclass(frozen=True, slots=True)
class ClassifyCall(Generic[WorkT]):
    """Run these rows together: (job, index of the row within the job)."""

    lane: LaneKey
    rows: tuple[tuple[Job[WorkT], int], ...]


@dataclass(frozen=True, slots=True)
class PrefillCall(Generic[WorkT]):
    """Remove `evict` in order, then read the job's tokens into the lane's batch as its last row."""

    lane: LaneKey
    evict: tuple[int, ...]
    job: Job[WorkT]


@dataclass(frozen=True, slots=True)
class DecodeCall(Generic[WorkT]):
    """Remove `evict` in order, then advance the remaining rows by one token; none may remain."""

    lane: LaneKey
    evict: tuple[int, ...]
    jobs: tuple[Job[WorkT], ...]


@dataclass(frozen=True, slots=True)
class SearchCall(Generic[WorkT]):
    """Free the memory of searches that are over, then take one step of the job's; none may be."""

    lane: LaneKey
    over: tuple[Job[WorkT], ...]
    job: Job[WorkT] | None


Call = ClassifyCall[WorkT] | PrefillCall[WorkT] | DecodeCall[WorkT] | SearchCall[WorkT]
