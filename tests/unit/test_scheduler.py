"""The scheduler's order: batches, turns, memory, endings."""

from typing import Any

import pytest

from serve.engine.job import ClassifyCall, Job, LaneKey, Limits, State
from serve.engine.scheduler import Scheduler

CLASSIFY = LaneKey("c", "classify", 2)
GENERATE = LaneKey("g", "generate", 4)
OTHER = LaneKey("g", "generate", 1)


def scheduler(**limits: Any) -> Scheduler[str]:
    return Scheduler(
        Limits(**limits),
        lambda lane, rows, positions: rows * positions * lane.steps,
    )


def classify(name: str, *lengths: int, lane: LaneKey = CLASSIFY) -> Job[str]:
    return Job(lane, name, lengths)


def generate(name: str, positions: int = 10, lane: LaneKey = GENERATE) -> Job[str]:
    return Job(lane, name, (5,), positions)


def names(call: object) -> list[str]:
    assert isinstance(call, ClassifyCall)
    return [f"{job.work}{row}" for job, row in call.rows]


def test_nothing_to_do() -> None:
    assert scheduler().next(0.0) is None
    assert scheduler().wake_s() is None


def test_waiting_rows_of_all_requests_run_together() -> None:
    s = scheduler(batch_rows=4)
    s.add(classify("a", 10, 10), 0.0)
    s.add(classify("b", 10, 10, 10), 0.0)
    assert names(s.next(0.0)) == ["a0", "a1", "b0", "b1"]
    assert names(s.next(0.0)) == ["b2"]
    assert s.next(0.0) is None


def test_rows_of_like_length_run_together() -> None:
    s = scheduler(batch_rows=8)
    s.add(classify("a", 100, 400, 90, 300, 110), 0.0)
    assert names(s.next(0.0)) == ["a0", "a2", "a4"]
    assert names(s.next(0.0)) == ["a1", "a3"]


def test_rows_that_cannot_be_padded_run_with_their_like_only() -> None:
    s = scheduler(batch_rows=8)
    s.add(Job(CLASSIFY, "a", (10, 11, 10, 12), may_pad=False), 0.0)
    assert [names(s.next(0.0)) for _ in range(3)] == [["a0", "a2"], ["a1"], ["a3"]]


def test_the_oldest_row_is_never_passed_over() -> None:
    s = scheduler(batch_rows=2)
    s.add(classify("odd", 500), 0.0)
    s.add(classify("b", *[10] * 20), 0.0)
    assert names(s.next(0.0)) == ["odd0"]


def test_a_call_holds_its_token_budget() -> None:
    s = scheduler(batch_rows=16, batch_tokens=100)
    s.add(classify("a", *[30] * 5), 0.0)
    s.add(classify("b", 500), 0.0)
    assert [len(names(s.next(0.0))) for _ in range(3)] == [3, 2, 1]


def test_a_batch_may_wait_for_company() -> None:
    s = scheduler(batch_rows=2, max_wait_s=0.5)
    s.add(classify("a", 10), 1.0)
    assert s.next(1.2) is None
    assert s.wake_s() == 1.5
    s.add(classify("b", 10), 1.3)
    assert names(s.next(1.3)) == ["a0", "b0"]
    s.add(classify("c", 10), 2.0)
    assert names(s.next(2.5)) == ["c0"]


def test_the_queue_is_bounded_by_requests_that_wait() -> None:
    s = scheduler(queue_requests=2)
    s.add(classify("a", 10), 0.0)
    s.add(generate("b"), 0.0)
    before = s.full, s.queued, s.running
    s.next(0.0)
    assert before == (True, 2, 0)
    assert (s.full, s.queued, s.running) == (False, 1, 1)


def test_ending_a_job_takes_it_out_wherever_it_is() -> None:
    s = scheduler(batch_rows=1)
    half, waiting, prompt = classify("a", 10, 10), classify("b", 10), generate("c")
    for job in (half, waiting, prompt):
        s.add(job, 0.0)
    assert names(s.next(0.0)) == ["a0"]
    assert s.jobs() == [half, waiting, prompt]
    assert all(s.end(job) for job in (half, waiting, prompt))
    assert not any(s.end(job) for job in (half, waiting, prompt))
    assert not s.row_done(half)
    assert s.next(0.0) is None and s.jobs() == [] and (s.queued, s.running) == (0, 0)


def test_a_classification_ends_with_its_last_row() -> None:
    s = scheduler()
    job = classify("a", 10, 10)
    s.add(job, 0.0)
    s.next(0.0)
    assert [s.row_done(job), s.row_done(job)] == [False, True]
    assert job.state is State.ENDED and s.running == 0


def test_busy_turns() -> None:
    s = scheduler(batch_rows=2)
    assert s.busy_turns() == []
    s.add(classify("a", *[10] * 5), 0.0)
    s.add(generate("b"), 0.0)
    assert s.busy_turns() == [(CLASSIFY, "classify"), (GENERATE, "prefill")]


@pytest.mark.parametrize(
    "limits", [{"queue_requests": 0}, {"batch_rows": 0}, {"cache_bytes": 0}, {"max_wait_s": -1}]
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)
