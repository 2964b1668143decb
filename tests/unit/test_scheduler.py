"""What an engine plans: batches, turns, endings."""

import gc
import weakref
from typing import Any

import pytest

from serve.engine.classify import Batch
from serve.engine.job import Deadline, Job, LaneKey, Limits, State
from serve.engine.loaded import Call
from serve.errors import QueueFull
from tests.stepped import SteppedEngine, classification, generation

CLASSIFY = LaneKey("c", "classify", 2)
GENERATE = LaneKey("g", "generate", 4)
NAMES: dict[Job, str] = {}


def engine(**limits: Any) -> SteppedEngine:
    return SteppedEngine(Limits(**limits))


def classify(name: str, *lengths: int, **fields: Any) -> Job:
    job = classification(CLASSIFY, lengths, lambda event: None, **fields)
    NAMES[job] = name
    return job


def generate() -> Job:
    return generation(GENERATE, 5, 5, lambda event: None)


def names(call: Call | None) -> list[str]:
    assert call is not None and isinstance(call.what, Batch)
    return [f"{NAMES[job]}{row}" for job, row in call.what.rows]


def test_nothing_to_do() -> None:
    assert engine().step() is None


def test_waiting_rows_of_all_requests_run_together() -> None:
    s = engine(batch_rows=4)
    s.submit(classify("a", 10, 10))
    s.submit(classify("b", 10, 10, 10))
    assert names(s.step()) == ["a0", "a1", "b0", "b1"]
    assert names(s.step()) == ["b2"]
    assert s.step() is None


def test_rows_of_like_length_run_together() -> None:
    s = engine(batch_rows=8)
    s.submit(classify("a", 100, 400, 90, 300, 110))
    assert names(s.step()) == ["a0", "a2", "a4"]
    assert names(s.step()) == ["a1", "a3"]


def test_rows_that_cannot_be_padded_run_with_their_like_only() -> None:
    s = engine(batch_rows=8)
    s.submit(classify("a", 10, 11, 10, 12, may_pad=False))
    assert [names(s.step()) for _ in range(3)] == [["a0", "a2"], ["a1"], ["a3"]]


def test_the_oldest_row_is_never_passed_over() -> None:
    s = engine(batch_rows=2)
    s.submit(classify("odd", 500))
    s.submit(classify("b", *[10] * 20))
    assert names(s.step()) == ["odd0"]


def test_a_call_holds_its_token_budget() -> None:
    s = engine(batch_rows=16, batch_tokens=100)
    s.submit(classify("a", *[30] * 5))
    s.submit(classify("b", 500))
    assert [len(names(s.step())) for _ in range(3)] == [3, 2, 1]


def test_a_batch_may_wait_for_company() -> None:
    s = engine(batch_rows=2, max_wait_s=0.5)

    def at(now_s: float) -> SteppedEngine:
        s.now_s = now_s
        return s

    at(1.0).submit(classify("a", 10))
    assert at(1.2).step() is None
    assert next(iter(s._classify_lanes())).wake_s == 1.5
    at(1.3).submit(classify("b", 10))
    assert names(s.step()) == ["a0", "b0"]
    at(2.0).submit(classify("c", 10))
    assert names(at(2.5).step()) == ["c0"]


def test_the_queue_is_bounded_by_requests_that_wait() -> None:
    s = engine(queue_requests=2)
    s.submit(classify("a", 10))
    s.submit(generate())
    with pytest.raises(QueueFull):
        s.submit(generate())
    assert (s.queued, s.running) == (2, 0)
    s.step()
    s.submit(generate())
    assert (s.queued, s.running) == (2, 0)


def test_ending_a_job_takes_it_out_wherever_it_is() -> None:
    s = engine(batch_rows=1)
    half, waiting, prompt = classify("a", 10, 10), classify("b", 10), generate()
    s.submit(half, waiting)
    s.submit(prompt)
    assert names(s.step()) == ["a0"]
    assert s.jobs() == [half, waiting, prompt]
    assert all(s.cancel(job) for job in (half, waiting, prompt))
    assert not any(s.cancel(job) for job in (half, waiting, prompt))
    assert s.step() is None and s.jobs() == [] and (s.queued, s.running) == (0, 0)


def test_nothing_is_kept_of_requests_that_ended_long_before_their_deadline() -> None:
    s = engine()
    ended = []
    for _ in range(300):
        job = classify("a", 10, deadline=Deadline(s.now_s, 3600.0))
        s.submit(job)
        s.step()
        ended.append(weakref.ref(job.work))
    NAMES.clear()
    del job
    gc.collect()
    assert s.jobs() == [] and not any(work() for work in ended)
    assert len(s._jobs._deadlines) < 100


def test_a_classification_ends_with_its_last_row() -> None:
    s = engine(batch_rows=1)
    job = classify("a", 10, 10)
    s.submit(job)
    s.step()
    assert (job.state, s.running) == (State.RUNNING, 1)
    s.step()
    assert (job.state, s.running) == (State.ENDED, 0)


def test_busy_lanes() -> None:
    s = engine(batch_rows=2)
    assert s.model("c").busy() == s.model("g").busy() == []
    s.submit(classify("a", *[10] * 5))
    s.submit(generate())
    assert s.model("c").busy() == [(CLASSIFY, "classify")]
    assert s.model("g").busy() == [(GENERATE, "prefill")]
