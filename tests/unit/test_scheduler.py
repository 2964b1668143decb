"""The scheduler's order: batches, turns, memory, endings."""

import pytest

from serve.job import ClassifyCall, DecodeCall, Job, LaneKey, PrefillCall, State
from serve.scheduler import Limits, Scheduler

CLASSIFY = LaneKey("c", "classify", 2)
GENERATE = LaneKey("g", "generate", 4)
OTHER = LaneKey("g", "generate", 1)


def scheduler(**limits: float) -> Scheduler[str]:
    return Scheduler(Limits(**limits), lambda lane, rows, positions: rows * positions * lane.steps)  # type: ignore[arg-type]


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


def test_a_generation_is_read_and_then_decoded() -> None:
    s = scheduler()
    job = generate("a")
    s.add(job, 0.0)
    call = s.next(0.5)
    assert isinstance(call, PrefillCall) and call.job is job and call.evict == ()
    assert (job.state, job.queued_s, job.started_s) == (State.RUNNING, 0.0, 0.5)
    for _ in range(3):
        assert s.next(1.0) == DecodeCall(GENERATE, (), (job,))
    assert s.end(job)
    assert s.evict(GENERATE) == (0,)
    assert s.next(1.0) is None
    assert (s.queued, s.running, s.charged_bytes) == (0, 0, 0)


def test_reading_and_decoding_take_turns() -> None:
    s = scheduler()
    for name in "abc":
        s.add(generate(name), 0.0)
    kinds = [type(s.next(0.0)).__name__ for _ in range(6)]
    assert kinds == ["PrefillCall", "DecodeCall"] * 3


def test_lanes_take_turns() -> None:
    s = scheduler(batch_rows=1)
    s.add(generate("g", lane=GENERATE), 0.0)
    s.add(generate("h", lane=OTHER), 0.0)
    s.add(classify("c", *[10] * 50), 0.0)
    seen = [s.next(0.0) for _ in range(15)]
    lanes = [(call.lane, type(call).__name__) for call in seen if call]
    assert lanes.count((CLASSIFY, "ClassifyCall")) >= 4
    assert lanes.count((GENERATE, "DecodeCall")) >= 3
    assert lanes.count((OTHER, "DecodeCall")) >= 3


def test_rows_keep_the_numbers_of_the_batch() -> None:
    s = scheduler()
    a, b, c, d = jobs = [generate(name) for name in "abcd"]
    for job in jobs:
        s.add(job, 0.0)
    while any(job.state is State.QUEUED for job in jobs):
        s.next(0.0)
    assert s.rows(GENERATE) == (a, b, c, d)
    s.end(a)
    s.end(c)
    # d takes the place of a; then c, where it was, is the last.
    assert s.evict(GENERATE) == (0, 2)
    assert s.rows(GENERATE) == (d, b)


def test_a_row_that_left_shows_in_the_next_call() -> None:
    s = scheduler()
    a, b = generate("a"), generate("b")
    for job in (a, b):
        s.add(job, 0.0)
        s.next(0.0)
    s.next(0.0)
    s.end(a)
    call = s.next(0.0)
    while not isinstance(call, DecodeCall):
        call = s.next(0.0)
    assert call.evict == (0,) and call.jobs == (b,)


def test_the_last_row_that_left_still_gets_its_memory_freed() -> None:
    s = scheduler()
    job = generate("a")
    s.add(job, 0.0)
    s.next(0.0)
    s.end(job)
    assert s.charged_bytes > 0
    assert s.next(0.0) == DecodeCall(GENERATE, (0,), ())
    assert s.charged_bytes == 0


def test_a_full_row_is_read_again_before_new_ones() -> None:
    s = scheduler(decode_rows=2)
    a, b = generate("a"), generate("b")
    s.add(a, 0.0)
    s.next(0.0)
    s.add(b, 0.0)
    s.read_again(a)
    assert s.evict(GENERATE) == (0,)
    again = next(call for _ in range(3) if isinstance(call := s.next(0.0), PrefillCall))
    assert again.job is a and a.state is State.RUNNING
    fresh = next(call for _ in range(3) if isinstance(call := s.next(0.0), PrefillCall))
    assert fresh.job is b


def test_memory_admits_what_fits_and_counts_the_longest_row() -> None:
    # 4 steps a position: 10 positions take 40, and 20 make every row of the lane take 80.
    s = scheduler(cache_bytes=170)
    a, b, c = generate("a", 10), generate("b", 20), generate("c", 10)
    for job in (a, b, c):
        s.add(job, 0.0)
    calls = [s.next(0.0) for _ in range(6)]
    assert [call.job for call in calls if isinstance(call, PrefillCall)] == [a, b]
    assert s.charged_bytes == 160
    s.end(b)
    s.evict(GENERATE)
    calls = [s.next(0.0) for _ in range(3)]
    assert [call.job for call in calls if isinstance(call, PrefillCall)] == [c]


def test_the_oldest_that_waits_for_memory_is_not_overtaken() -> None:
    s = scheduler(cache_bytes=100)
    running, big, small = generate("r", 10), generate("b", 25), generate("s", 10, OTHER)
    for job in (running, big, small):
        s.add(job, 0.0)
        s.next(0.0)
    assert [s.next(0.0) for _ in range(8)].count(None) == 0
    assert (running.state, big.state, small.state) == (
        State.RUNNING,
        State.QUEUED,
        State.QUEUED,
    )
    s.end(running)
    for _ in range(6):
        s.next(0.0)
    assert big.state is State.RUNNING and small.state is State.QUEUED


def test_memory_that_the_buffers_still_hold_is_not_given_away() -> None:
    s = scheduler(cache_bytes=100)
    a = generate("a", 10)
    s.add(a, 0.0)
    s.next(0.0)
    s.hold(GENERATE, 95)
    b = generate("b", 10, OTHER)
    s.add(b, 0.0)
    assert not any(isinstance(s.next(0.0), PrefillCall) for _ in range(4))
    s.hold(GENERATE, 40)
    assert any(isinstance(s.next(0.0), PrefillCall) for _ in range(4))


def test_what_can_never_fit_is_known_beforehand() -> None:
    s = scheduler(cache_bytes=100)
    assert s.fits(GENERATE, 25) and not s.fits(GENERATE, 26)


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


def test_a_lost_batch_leaves_nothing() -> None:
    s = scheduler()
    job = generate("a")
    s.add(job, 0.0)
    s.next(0.0)
    s.end(job)
    s.abandon(GENERATE)
    assert s.next(0.0) is None and s.charged_bytes == 0


def test_a_withdrawn_prompt_leaves_the_others() -> None:
    s = scheduler()
    a, b = generate("a"), generate("b")
    s.add(a, 0.0)
    s.next(0.0)
    s.add(b, 0.0)
    while b.state is State.QUEUED:
        s.next(0.0)
    s.withdraw(b)
    s.end(b)
    assert s.rows(GENERATE) == (a,)


def test_busy_turns_and_calls_ahead() -> None:
    s = scheduler(batch_rows=2)
    assert s.busy_turns() == [] and s.calls_ahead(CLASSIFY) == 0
    s.add(classify("a", *[10] * 5), 0.0)
    s.add(generate("b"), 0.0)
    assert s.busy_turns() == [(CLASSIFY, "classify"), (GENERATE, "prefill")]
    assert s.calls_ahead(CLASSIFY) == 2


@pytest.mark.parametrize(
    "limits", [{"queue_requests": 0}, {"batch_rows": 0}, {"cache_bytes": 0}, {"max_wait_s": -1}]
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)
