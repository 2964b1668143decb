"""A scheduler of generations and jobs for it, for tests that go call by call."""

from typing import Any

from serve.engine.job import Call, DecodeCall, DecodePart, Job, LaneKey, Limits, PrefillCall
from serve.engine.scheduler import Scheduler

ONE, TWO, FOUR, EIGHT = (LaneKey("g", "generate", steps) for steps in (1, 2, 4, 8))
CLASSIFY = LaneKey("c", "classify", 2)


def scheduler(most_lanes: int = 1, sides: int = 1, **limits: Any) -> Scheduler[str]:
    return Scheduler(
        Limits(**limits),
        lambda lane, rows, positions: rows * positions * lane.steps,
        lambda key: most_lanes,
        sides=lambda key: sides,
    )


def generate(name: str, positions: int = 10, lane: LaneKey = FOUR) -> Job[str]:
    return Job(lane, name, (5,), positions)


def run(s: Scheduler[str], pieces: int = 1) -> Call[str] | None:
    """The next call, and what becomes of it where all goes well."""
    call = s.next(0.0)
    if isinstance(call, PrefillCall) and call.job is not None and pieces == 1:
        s.prefilled(call.job, full=False)
    return call


def started(s: Scheduler[str], *jobs: Job[str]) -> None:
    """All have been read, and have joined."""
    for job in jobs:
        s.add(job, 0.0)
    for _ in range(50):
        run(s)
        if all(job in s.rows(job.lane) for job in jobs):
            return
    raise AssertionError("not all of them became rows")


def parts(call: object) -> tuple[DecodePart[str], ...]:
    assert isinstance(call, DecodeCall)
    return call.parts


def decoded(s: Scheduler[str]) -> DecodeCall[str]:
    for _ in range(5):
        call = run(s)
        if isinstance(call, DecodeCall):
            return call
    raise AssertionError("nothing decodes")
