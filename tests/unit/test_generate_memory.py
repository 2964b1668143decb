"""The scheduler's memory of generations: what is admitted, counted and given back."""

from serve.engine.job import PrefillCall, State
from tests.generation_jobs import FOUR, ONE, generate, run, scheduler, started


def test_memory_admits_what_fits_and_counts_the_longest_row() -> None:
    # 4 steps a position: 10 positions take 40, and 20 make every row of the lane take 80, and one
    # more, which is read beside them.
    s = scheduler(cache_bytes=250)
    a, b, c = generate("a", 10), generate("b", 20), generate("c", 10)
    for job in (a, b, c):
        s.add(job, 0.0)
    for _ in range(9):
        run(s)
    assert s.rows(FOUR) == (a, b) and c.state is State.QUEUED
    assert s.charged_bytes == 240
    s.end(b)
    s.evict(FOUR)
    for _ in range(4):
        run(s)
    assert s.rows(FOUR) == (a, c)


def test_the_oldest_that_waits_for_memory_is_not_overtaken() -> None:
    s = scheduler(cache_bytes=100)
    running, big, small = generate("r", 10), generate("b", 25), generate("s", 10, ONE)
    for job in (running, big, small):
        s.add(job, 0.0)
    assert [run(s) for _ in range(8)].count(None) == 0
    states = running.state, big.state, small.state
    assert states == (State.RUNNING, State.QUEUED, State.QUEUED)
    s.end(running)
    for _ in range(6):
        run(s)
    assert big.state is State.RUNNING and small.state is State.QUEUED


def test_memory_that_the_buffers_still_hold_is_not_given_away() -> None:
    s = scheduler(cache_bytes=100)
    started(s, generate("a", 10))
    s.set_held_bytes(FOUR, 95)
    s.add(generate("b", 10, ONE), 0.0)
    assert not any(isinstance(run(s), PrefillCall) for _ in range(4))
    s.set_held_bytes(FOUR, 40)
    assert any(isinstance(run(s), PrefillCall) for _ in range(4))


def test_what_can_never_fit_is_known_beforehand() -> None:
    s = scheduler(cache_bytes=100)
    assert s.fits(FOUR, 25) and not s.fits(FOUR, 26)


def test_a_lost_batch_leaves_nothing() -> None:
    s = scheduler()
    job = generate("a")
    started(s, job)
    s.end(job)
    s.drop_batch(FOUR)
    assert s.next(0.0) is None and s.charged_bytes == 0
