"""What is predicted of searches, and of those behind them, against a clock of its own."""

import math
import random

import pytest

from serve.engine.backlog import GenerationSize
from serve.engine.cost import IDLE_ANSWER_S, CostKey, LatencyModel
from serve.engine.job import (
    Deadline,
    DecodeCall,
    Job,
    Kind,
    LaneKey,
    Limits,
    PrefillCall,
    SearchCall,
)
from serve.engine.scheduler import Scheduler

MODEL, STEPS, SOURCE, TOKENS, BEAMS = "m", 2, 8, 20, 4
ROWS = 2  # that may run at once


def lane(kind: Kind) -> LaneKey:
    return LaneKey(MODEL, kind, STEPS)


def step_s(beams: int, length: int) -> float:
    return 0.001 + 0.0002 * beams * length


def read_s(source: int) -> float:
    return 0.002 + 0.0001 * source


def token_s(rows: int) -> float:
    return 0.0005 + 0.0001 * rows


class Clock:
    """A scheduler whose calls take what these say, which the latency model has seen."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.latency = LatencyModel()
        chance = random.Random(0)
        for _ in range(200):
            rows, length = chance.randint(1, 8), chance.randint(2, 24)
            seen = [
                (CostKey(MODEL, "search", STEPS), rows, length, step_s(rows, length)),
                (CostKey(MODEL, "prefill", STEPS), 1, length, read_s(length)),
                (CostKey(MODEL, "decode", STEPS), rows, length, token_s(rows)),
            ]
            for one in seen:
                self.latency.observe(*one)
        self.scheduler: Scheduler[str] = Scheduler(
            Limits(decode_rows=ROWS), lambda *_: 0, latency=self.latency
        )

    def add(self, kind: Kind, tokens: int = TOKENS, given_s: float | None = None) -> Job[str]:
        deadline = None if given_s is None else Deadline(self.now_s, given_s)
        beams = BEAMS if kind == "search" else 1
        job = Job(lane(kind), "", (SOURCE,), deadline=deadline, tokens_left=tokens, beams=beams)
        self.scheduler.add(job, self.now_s)
        return job

    def call(self) -> None:
        call = self.scheduler.next(self.now_s)
        jobs: list[Job[str]] = []
        if isinstance(call, SearchCall) and call.job is not None:
            jobs, length = [call.job], call.job.most_tokens - call.job.tokens_left + 1
            self.now_s += read_s(SOURCE) if length == 1 else step_s(call.job.beams, length)
        elif isinstance(call, PrefillCall) and call.job is not None:
            self.now_s += read_s(SOURCE)
            self.scheduler.prefilled(call.job, full=False)
            jobs = [call.job]
        elif isinstance(call, DecodeCall):
            jobs = list(call.parts[0].jobs)
            self.now_s += token_s(len(jobs)) if jobs else 0.0
        for job in jobs:
            job.tokens_left -= 1
            if job.tokens_left == 0:
                self.scheduler.end(job)

    def until(self, job: Job[str], begun: bool = False) -> float:
        """The time until it is over, or has begun."""
        began_s = self.now_s
        while job in self.scheduler.jobs() and not (begun and job.started_s is not None):
            self.call()
        return self.now_s - began_s


def search_s(tokens: int = TOKENS) -> float:
    """All calls of one search."""
    return read_s(SOURCE) + sum(step_s(BEAMS, length) for length in range(2, tokens + 1))


def test_a_search_alone_takes_its_calls_with_all_its_beams() -> None:
    model_backlog = Clock().scheduler.backlog.model_backlog(MODEL)
    for jobs in (1, 3):
        found_s = model_backlog.idle_s(lane("search"), GenerationSize(SOURCE, TOKENS, jobs, BEAMS))
        assert found_s == pytest.approx(jobs * search_s() + IDLE_ANSWER_S, rel=0.1)


def test_the_wait_behind_searches_is_theirs_and_falls_as_they_go() -> None:
    clock = Clock()
    jobs = [clock.add("search") for _ in range(8)]
    waits_s = []
    while clock.scheduler.queued:
        waits_s.append((clock.now_s, clock.scheduler.backlog.wait_s(clock.now_s)))
        clock.call()
    next_one = clock.add("search")  # who has waited for a place
    turn_s = clock.now_s + clock.until(next_one, begun=True)
    assert jobs[0].tokens_left == 0
    for at_s, wait_s in waits_s[ROWS:]:
        assert wait_s == pytest.approx(turn_s - at_s, rel=0.25)
    assert waits_s[-1][1] < 0.4 * waits_s[0][1]


@pytest.mark.parametrize("done", [0, 15])
def test_searches_and_texts_wait_for_each_other_as_long_as_they_last(done: int) -> None:
    wanted: tuple[tuple[Kind, int], ...] = (("generate", 60), ("search", TOKENS))
    for kind, tokens in wanted:
        clock = Clock()
        first = clock.add("search")
        clock.add("generate", 50)
        while first.tokens_left > TOKENS - done:
            clock.call()
        asked = GenerationSize(SOURCE, tokens, 1, BEAMS)
        told_s = clock.scheduler.backlog.model_backlog(MODEL).ready_s(lane(kind), asked)
        took_s = clock.until(clock.add(kind, tokens))
        told_s = (told_s - clock.latency.answer_s) / clock.latency.caution(MODEL)
        assert told_s == pytest.approx(took_s, rel=0.25)


@pytest.mark.parametrize("kind", ["generate", "search"])
def test_a_search_does_not_make_late_who_was_in_time(kind: Kind) -> None:
    clock, alone = Clock(), Clock()
    given_s = 1.6 * alone.until(alone.add(kind))
    clock.add(kind, given_s=given_s)
    model_backlog = clock.scheduler.backlog.model_backlog(MODEL)
    for tokens, in_time in ((1, True), (TOKENS, False)):
        asked = GenerationSize(SOURCE, tokens, 1, BEAMS)
        assert model_backlog.in_time(lane("search"), asked, math.inf, clock.now_s) is in_time
        assert (model_backlog.late_s(lane("search"), asked, 1e9, clock.now_s) <= 0) is in_time


def test_before_any_search_has_run_it_is_priced_as_rows_that_decode() -> None:
    latency = LatencyModel()
    for rows in (1, 2, 4, 8):
        latency.observe(CostKey(MODEL, "decode", STEPS), rows, 10, token_s(rows))
    scheduler: Scheduler[str] = Scheduler(Limits(), lambda *_: 0, latency=latency)
    model_backlog = scheduler.backlog.model_backlog(MODEL)
    one, four = (
        model_backlog.idle_s(lane("search"), GenerationSize(SOURCE, TOKENS, 1, n)) for n in (1, 4)
    )
    line = latency.decode_line(CostKey(MODEL, "decode", STEPS), 4)
    assert line is not None and four > one
    steps_s = (TOKENS - 1) * (line[0] + 11 * line[1])
    assert four - IDLE_ANSWER_S == pytest.approx(steps_s)
