"""What is predicted of generations when memory, not --decode-rows, decides how many run."""

import random

import pytest

from serve.engine.backlog import GenerationSize, ModelBacklog
from serve.engine.cost import IDLE_ANSWER_S, CostKey
from serve.engine.job import Deadline, LaneKey, Limits
from serve.errors import TooBusy
from tests.stepped import SteppedEngine, generation

LANE = LaneKey("g", "generate", 4)
PROMPT, TOKENS = 5, 40
POSITIONS = PROMPT + TOKENS
ROW_BYTES = POSITIONS * LANE.steps
ROWS = 2  # that fit, beside the prompt that is read


def token_s(rows: int) -> float:
    return 0.001 + 0.0001 * rows


def ready(cache_bytes: int = 10**9) -> SteppedEngine:
    """An engine whose calls take what this says, which it has seen."""

    def during(kind: str, steps: int, rows: int, length: int) -> None:
        engine.now_s += 0.001 if kind == "prefill" else token_s(rows)

    engine = SteppedEngine(Limits(decode_rows=8, cache_bytes=cache_bytes), during)
    cost, chance = engine.model("g").cost, random.Random(0)
    for _ in range(200):
        rows, length = chance.randint(1, 8), chance.randint(2, 60)
        cost.observe(CostKey("prefill", LANE.steps), 1, length, 0.001)
        cost.observe(CostKey("decode", LANE.steps), rows, length, token_s(rows))
    return engine


def backlog(engine: SteppedEngine) -> ModelBacklog:
    return engine._backlog.of_model(engine.model("g"))


def submit(engine: SteppedEngine, given_s: float | None = None) -> float:
    """The time that one more takes, whose deadline this is."""
    deadline = None if given_s is None else Deadline(engine.now_s, given_s)
    job = generation(
        LANE, PROMPT, TOKENS, lambda event: None, positions=POSITIONS, deadline=deadline
    )
    began_s = engine.now_s
    engine.submit(job)
    while job in engine.jobs():
        engine.step()
    return engine.now_s - began_s


def fill(engine: SteppedEngine, count: int) -> None:
    for _ in range(count):
        engine.submit(generation(LANE, PROMPT, TOKENS, lambda event: None, positions=POSITIONS))


def told_s(engine: SteppedEngine) -> float:
    found_s = backlog(engine).ready_s(LANE, GenerationSize(PROMPT, TOKENS))
    return (found_s - engine.answer.seconds) / engine.cost(engine.model("g").served).caution


@pytest.mark.parametrize("others", [1, 2, 4, 6])
def test_the_time_is_told_with_the_rows_that_fit(others: int) -> None:
    engine = ready((ROWS + 1) * ROW_BYTES)
    fill(engine, others)
    predicted_s = told_s(engine)
    assert predicted_s == pytest.approx(submit(engine), rel=0.2)


def test_a_deadline_is_not_accepted_that_only_more_memory_would_meet() -> None:
    wide = ready()
    fill(wide, 6)
    enough_s = 1.5 * told_s(wide)
    assert submit(wide, enough_s) < enough_s
    engine = ready((ROWS + 1) * ROW_BYTES)
    fill(engine, 6)
    with pytest.raises(TooBusy, match="try again later"):
        submit(engine, enough_s)


def test_texts_of_one_request_take_turns_where_memory_is_short() -> None:
    engine, wide = ready((ROWS + 1) * ROW_BYTES), ready()
    six = GenerationSize(PROMPT, TOKENS, 6)
    short_s = backlog(engine).idle_s(LANE, six) - IDLE_ANSWER_S
    expected_s = 6 * 0.001 + 3 * (TOKENS - 1) * token_s(ROWS)
    assert short_s == pytest.approx(expected_s, rel=0.1)
    assert backlog(wide).idle_s(LANE, six) < 0.6 * short_s


def test_short_texts_need_no_turns() -> None:
    engine = ready((ROWS + 1) * ROW_BYTES)
    asked = GenerationSize(PROMPT, 5, 6)  # 10 positions each
    assert backlog(engine).idle_s(LANE, asked) == backlog(ready()).idle_s(LANE, asked)
