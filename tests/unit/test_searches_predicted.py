"""What is predicted of searches, and of those behind them, against a clock of its own."""

import math
import random

import pytest

from serve.engine.backlog import GenerationSize, ModelBacklog
from serve.engine.cost import IDLE_ANSWER_S, CostKey
from serve.engine.job import Deadline, Job, Kind, LaneKey, Limits
from tests.stepped import SteppedEngine, generation, translation

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
    """An engine whose calls take what these say, which it has seen."""

    def __init__(self) -> None:
        self.engine = SteppedEngine(
            Limits(decode_rows=ROWS), self.during, names={MODEL: "translate"}
        )
        self.cost, chance = self.engine.model(MODEL).cost, random.Random(0)
        for _ in range(200):
            rows, length = chance.randint(1, 8), chance.randint(2, 24)
            self.cost.observe(CostKey("search", STEPS), rows, length, step_s(rows, length))
            self.cost.observe(CostKey("prefill", STEPS), 1, length, read_s(length))
            self.cost.observe(CostKey("decode", STEPS), rows, length, token_s(rows))

    @property
    def backlog(self) -> ModelBacklog:
        return self.engine._backlog.of_model(self.engine.model(MODEL))

    def wait_s(self) -> float:
        return self.engine._backlog.wait_s(self.engine.now_s)

    def during(self, kind: str, steps: int, rows: int, length: int) -> None:
        if kind == "prefill":
            seconds = read_s(SOURCE)
        else:
            seconds = step_s(rows, length) if kind == "search" else token_s(rows)
        self.engine.now_s += seconds

    def add(self, kind: Kind, tokens: int = TOKENS, given_s: float | None = None) -> Job:
        deadline = None if given_s is None else Deadline(self.engine.now_s, given_s)
        if kind == "search":
            job = translation(lane(kind), SOURCE, tokens, lambda event: None, BEAMS)
        else:
            job = generation(lane(kind), SOURCE, tokens, lambda event: None)
        job.deadline = deadline
        job.ends_s = math.inf if deadline is None else deadline.ends_s
        self.engine.submit(job)
        return job

    def until(self, job: Job, begun: bool = False) -> float:
        """The time until it is over, or has begun."""
        began_s = self.engine.now_s
        while job in self.engine.jobs() and not (begun and job.started_s is not None):
            self.engine.step()
        return self.engine.now_s - began_s


def search_s(tokens: int = TOKENS) -> float:
    """All calls of one search."""
    return read_s(SOURCE) + sum(step_s(BEAMS, length) for length in range(2, tokens + 1))


def test_a_search_alone_takes_its_calls_with_all_its_beams() -> None:
    model_backlog = Clock().backlog
    for jobs in (1, 3):
        found_s = model_backlog.idle_s(lane("search"), GenerationSize(SOURCE, TOKENS, jobs, BEAMS))
        assert found_s == pytest.approx(jobs * search_s() + IDLE_ANSWER_S, rel=0.1)


def test_the_wait_behind_searches_is_theirs_and_falls_as_they_go() -> None:
    clock = Clock()
    jobs = [clock.add("search") for _ in range(8)]
    waits_s = []
    while clock.engine.queued:
        waits_s.append((clock.engine.now_s, clock.wait_s()))
        clock.engine.step()
    next_one = clock.add("search")  # who has waited for a place
    turn_s = clock.engine.now_s + clock.until(next_one, begun=True)
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
            clock.engine.step()
        asked = GenerationSize(SOURCE, tokens, 1, BEAMS)
        told_s = clock.backlog.ready_s(lane(kind), asked)
        took_s = clock.until(clock.add(kind, tokens))
        told_s = (told_s - clock.engine.answer.seconds) / clock.cost.caution
        assert told_s == pytest.approx(took_s, rel=0.25)


@pytest.mark.parametrize("kind", ["generate", "search"])
def test_a_search_does_not_make_late_who_was_in_time(kind: Kind) -> None:
    clock, alone = Clock(), Clock()
    given_s = 1.6 * alone.until(alone.add(kind))
    clock.add(kind, given_s=given_s)
    model_backlog = clock.backlog
    for tokens, in_time in ((1, True), (TOKENS, False)):
        asked = GenerationSize(SOURCE, tokens, 1, BEAMS)
        assert (
            model_backlog.late_s(lane("search"), asked, 1e9, clock.engine.now_s) <= 0
        ) is in_time
        assert (
            model_backlog.late_s(lane("search"), asked, 1e9, clock.engine.now_s) <= 0
        ) is in_time


def test_before_any_search_has_run_it_is_priced_as_rows_that_decode() -> None:
    engine = SteppedEngine(Limits(), names={MODEL: "translate"})
    cost = engine.model(MODEL).cost
    for rows in (1, 2, 4, 8):
        cost.observe(CostKey("decode", STEPS), rows, 10, token_s(rows))
    model_backlog = engine._backlog.of_model(engine.model(MODEL))
    one, four = (
        model_backlog.idle_s(lane("search"), GenerationSize(SOURCE, TOKENS, 1, n)) for n in (1, 4)
    )
    line = cost.token(lane("generate"), 4)
    assert line != (0.0, 0.0) and four > one
    steps_s = (TOKENS - 1) * (line[0] + 11 * line[1])
    assert four - IDLE_ANSWER_S == pytest.approx(steps_s)
