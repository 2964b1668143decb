"""The scheduler's order for beam searches: turns, memory, endings."""

from typing import Any

from serve.engine.job import (
    ClassifyCall,
    DecodeCall,
    Job,
    LaneKey,
    Limits,
    PrefillCall,
    SearchCall,
    State,
)
from serve.engine.scheduler import Scheduler

SEARCH = LaneKey("t", "search", 4)


def scheduler(**limits: Any) -> Scheduler[str]:
    return Scheduler(Limits(**limits), lambda lane, rows, positions: rows * positions * lane.steps)


def search(name: str, positions: int = 10, lane: LaneKey = SEARCH) -> Job[str]:
    return Job(lane, name, (5,), positions)


def test_searches_take_turns_with_each_other_and_with_the_rest() -> None:
    s = scheduler(batch_rows=1)
    first, second = search("first"), search("second")
    for job in (
        first,
        second,
        search("g", lane=LaneKey("g", "generate", 4)),
        Job(LaneKey("c", "classify", 2), "c", (10,) * 9),
    ):
        s.add(job, 0.0)
    calls = []
    for _ in range(16):
        calls.append(call := s.next(0.0))
        if isinstance(call, PrefillCall) and call.job is not None:
            s.prefilled(call.job, full=False)
    stepped = [call.job.work for call in calls if isinstance(call, SearchCall) and call.job]
    assert stepped[:5] == ["first", "first", "second", "first", "second"]
    assert sum(isinstance(call, DecodeCall) for call in calls) >= 3
    assert sum(isinstance(call, ClassifyCall) for call in calls) >= 4


def test_searches_hold_memory_until_they_are_forgotten() -> None:
    s = scheduler(cache_bytes=100)
    first, second = search("first"), search("second", 20)
    for job in (first, second):
        s.add(job, 0.0)
    assert s.next(0.0) == SearchCall(SEARCH, (), first)
    assert (s.charged_bytes, second.state) == (40, State.QUEUED)
    s.end(first)
    assert s.charged_bytes == 40
    assert s.next(0.0) == SearchCall(SEARCH, (first,), second)
    s.end(second)
    assert not s.close("t")  # its memory is still to be freed
    assert s.forget(SEARCH) == (second,)
    assert (s.charged_bytes, s.running, s.next(0.0)) == (0, 0, None)
    assert s.close("t")
