"""What is predicted of several texts that are asked for at once."""

import pytest

from serve.engine.backlog import GenerationSize, ModelBacklog
from serve.engine.cost import IDLE_ANSWER_S, Cost, CostKey
from serve.engine.job import LaneKey

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
