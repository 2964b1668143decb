"""What an engine plans for beam searches: turns, memory, endings."""

from typing import Any

from serve.catalog import Served
from serve.engine.job import Job, LaneKey, Limits, State
from tests.stepped import SteppedEngine, classification, generation, translation

SEARCH = LaneKey("t", "search", 4)


def engine(**limits: Any) -> SteppedEngine:
    return SteppedEngine(Limits(**limits))


def search(positions: int = 10) -> Job:
    return translation(SEARCH, 5, 1000, lambda event: None, positions=positions)


def leave(s: SteppedEngine) -> Served:
    served = s.catalog.find("t")
    s.dismiss(served)
    return served


def test_searches_take_turns_with_each_other_and_with_the_rest() -> None:
    s = engine(batch_rows=1)
    first, second = search(), search()
    s.submit(first, second)
    s.submit(generation(LaneKey("g", "generate", 4), 5, 100, lambda event: None))
    s.submit(classification(LaneKey("c", "classify", 2), (10,) * 9, lambda event: None))
    calls = [call for _ in range(16) if (call := s.step())]
    stepped = [call.jobs[0] for call in calls if call.kind == "search"]
    assert stepped[:5] == [first, first, second, first, second]
    assert sum(call.kind == "decode" for call in calls) >= 3
    assert sum(call.kind == "classify" for call in calls) >= 4


def test_searches_hold_memory_until_they_are_over() -> None:
    s = engine(cache_bytes=100)
    first, second = search(), search(20)
    s.submit(first, second)
    call = s.step()
    assert call is not None and list(call.jobs) == [first]
    assert (s.charged_bytes, second.state) == (40, State.QUEUED)
    s.cancel(first)
    call = s.step()
    assert call is not None and list(call.jobs) == [second]
    assert s.charged_bytes == 80
    served = leave(s)
    s.step()
    assert s.leaving == (served,)  # its last job runs
    s.cancel(second)
    assert s.step() is None and (s.charged_bytes, s.running) == (0, 0)
    assert not s.leaving
