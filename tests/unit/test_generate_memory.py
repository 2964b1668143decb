"""The scheduler's memory of generations: what is admitted, counted and given back."""

import pytest

from serve.engine.job import State
from serve.errors import Unprocessable
from tests.generation_jobs import FOUR, ONE, engine, generate, started
from tests.stepped import CountedBatch


def test_memory_admits_what_fits_and_counts_the_longest_row() -> None:
    # 4 steps a position: 10 positions take 40, and 20 make every row of the lane take 80, and one
    # more, which is read beside them.
    s = engine(cache_bytes=250)
    a, b, c = generate("a", 10), generate("b", 20), generate("c", 10)
    for job in (a, b, c):
        s.submit(job)
    for _ in range(9):
        s.step()
    assert s.rows(FOUR) == (a, b) and c.state is State.QUEUED
    assert s.charged_bytes == 240
    s.cancel(b)
    s.step()
    assert s.rows(FOUR) == (a,)
    for _ in range(4):
        s.step()
    assert s.rows(FOUR) == (a, c)


def test_the_oldest_that_waits_for_memory_is_not_overtaken() -> None:
    s = engine(cache_bytes=100)
    running, big, small = generate("r", 10), generate("b", 25), generate("s", 10, ONE)
    for job in (running, big, small):
        s.submit(job)
    assert [s.step() for _ in range(8)].count(None) == 0
    states = running.state, big.state, small.state
    assert states == (State.RUNNING, State.QUEUED, State.QUEUED)
    s.cancel(running)
    for _ in range(6):
        s.step()
    assert big.state is State.RUNNING and small.state is State.QUEUED


def test_memory_that_the_buffers_still_hold_is_not_given_away() -> None:
    s = engine(cache_bytes=100)
    started(s, generate("a", 10))
    batch = s.lane(FOUR).batch
    assert isinstance(batch, CountedBatch)
    batch.held_bytes = 95
    other = generate("b", 10, ONE)
    s.submit(other)
    for _ in range(4):
        s.step()
    assert s.queued == 1
    batch.held_bytes = 40
    for _ in range(4):
        s.step()
    assert s.queued == 0


def test_what_can_never_fit_is_refused() -> None:
    s = engine(cache_bytes=100)
    s.submit(generate("fits", 25))
    with pytest.raises(Unprocessable, match="lower max_tokens or steps"):
        s.submit(generate("does not", 26))


def test_a_batch_that_nobody_waits_for_leaves_nothing() -> None:
    s = engine()
    job = generate("a")
    started(s, job)
    assert s.charged_bytes > 0 and s.cache_bytes > 0
    s.cancel(job)
    assert s.step() is None and s.charged_bytes == s.cache_bytes == 0
