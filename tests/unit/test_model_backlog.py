"""What is predicted of several texts that are asked for at once."""

import pytest

from serve.engine.backlog import GenerationSize, ModelBacklog
from serve.engine.cost import IDLE_ANSWER_S, Cost, CostKey
from serve.engine.job import LaneKey, Limits
from tests.stepped import SteppedEngine, translation

KEY = LaneKey("m", "generate", 1)
PROMPT, TOKENS = 10, 11


@pytest.fixture
def model_backlog() -> ModelBacklog:
    cost = Cost()
    cost.observe(CostKey("prefill", 1), 1, PROMPT, 0.5)
    cost.observe(CostKey("decode", 1), 1, PROMPT, 0.01)
    return ModelBacklog(cost, IDLE_ANSWER_S, [], 2, beside_s=0.0)


@pytest.mark.parametrize(("texts", "rows", "waves"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2)])
def test_prompts_are_read_one_by_one_and_rows_decode_together(
    model_backlog: ModelBacklog, texts: int, rows: int, waves: int
) -> None:
    asked = GenerationSize(PROMPT, TOKENS, texts)
    reads_s = texts * 0.5
    line = model_backlog._cost.token(KEY, rows)
    tokens_s = waves * (TOKENS - 1) * (line[0] + line[1] * (PROMPT + TOKENS // 2))
    expected_s = pytest.approx(reads_s + tokens_s + IDLE_ANSWER_S, rel=1e-6)
    assert model_backlog.idle_s(KEY, asked) == expected_s
    assert model_backlog.ready_s(KEY, asked) >= reads_s + tokens_s


def test_a_text_longer_than_the_window_is_as_long_as_what_is_cached() -> None:
    window = 16
    cached, reads = [], 0
    positions = PROMPT
    for _ in range(1000):
        if positions == window:  # goes on with its last half
            positions, reads = window // 2, reads + 1
        positions += 1
        cached.append(positions)
    asked = GenerationSize(PROMPT, 1000, window=window)
    assert asked.length == pytest.approx(sum(cached) / 1000, abs=1)
    assert (asked.rereads, asked.reread) == (reads, window // 2)
    within = GenerationSize(PROMPT, window - PROMPT, window=window)
    assert (within.length, within.rereads) == (PROMPT + (window - PROMPT) // 2, 0)
    assert within.length == within._replace(window=0).length


def test_what_a_full_window_keeps_is_read_again(model_backlog: ModelBacklog) -> None:
    long = GenerationSize(PROMPT, 100, window=20)  # 10 within, then 9 times 10
    each_s = model_backlog._cost.prompts_s(KEY, 10, 1)
    line = model_backlog._cost.token(KEY, 1)
    expected_s = 10 * each_s + 99 * (line[0] + line[1] * long.length) + IDLE_ANSWER_S
    assert long.length == 15
    assert model_backlog.idle_s(KEY, long) == pytest.approx(expected_s, rel=1e-6)


def test_a_token_of_a_translation_takes_as_long_as_its_answer_is_whatever_the_source() -> None:
    engine, key = SteppedEngine(Limits()), LaneKey("t", "generate", 1)
    cost = engine.model("t").cost

    def token_s(rows: int, length: int) -> float:  # every token runs its whole prefix again
        return 0.001 + 0.0001 * rows * length

    for length in (*range(1, 40),) * 4:
        for rows in (1, 4):
            cost.observe(CostKey("decode", 1), rows, length, token_s(rows, length))
    cost.observe(CostKey("prefill", 1), 1, 100, 0.001)
    expected_s = sum(token_s(1, length) for length in range(1, 31))
    backlog = engine._backlog.of_model(engine.model("t"))
    found_s = backlog.idle_s(key, GenerationSize(100, 30)) - IDLE_ANSWER_S
    assert found_s == pytest.approx(expected_s, rel=0.1)
    engine.submit(translation(key, 100, 30, lambda event: None))
    backlog = engine._backlog.of_model(engine.model("t"))
    ready_s = backlog.ready_s(key, GenerationSize(100, 30)) / cost.caution
    both_s = sum(token_s(2, length) for length in range(1, 31))
    assert ready_s == pytest.approx(both_s, rel=0.1)
