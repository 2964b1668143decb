"""A stepped engine of generations and jobs for it, for tests that go call by call."""

from typing import Any

from serve.engine.generate import DecodePart
from serve.engine.job import Job, LaneKey, Limits
from serve.engine.loaded import Call
from tests.stepped import SteppedEngine, generation, parts

ONE, TWO, FOUR, EIGHT = (LaneKey("g", "generate", steps) for steps in (1, 2, 4, 8))
CLASSIFY = LaneKey("c", "classify", 2)
NAMES: dict[Job, str] = {}


def engine(most_lanes: int = 1, pieces: int = 1, **limits: Any) -> SteppedEngine:
    return SteppedEngine(Limits(**limits), most_lanes=most_lanes, pieces=pieces)


def generate(name: str, positions: int = 10, lane: LaneKey = FOUR, tokens: int = 10_000) -> Job:
    job = generation(lane, 5, tokens, lambda event: None, positions=positions)
    NAMES[job] = name
    return job


def started(s: SteppedEngine, *jobs: Job) -> None:
    """All have been read, and have joined."""
    s.submit(*jobs)
    for _ in range(50):
        s.step()
        if all(job in s.rows(job.lane) for job in jobs):
            return
    raise AssertionError("not all of them became rows")


def decoded(s: SteppedEngine) -> Call:
    for _ in range(5):
        call = s.step()
        if call is not None and call.kind == "decode":
            return call
    raise AssertionError("nothing decodes")


def decoded_parts(s: SteppedEngine) -> tuple[DecodePart, ...]:
    return parts(decoded(s))
