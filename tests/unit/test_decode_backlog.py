"""How often lanes have a token, as predicted for what they share."""

import random
from collections.abc import Callable
from typing import cast

import pytest

from serve.engine.backlog import LaneLoad, ModelBacklog, tokens_until_slot
from serve.engine.cost import IDLE_ANSWER_S, Cost
from serve.engine.generate import GenerateLane
from serve.engine.job import Job, LaneKey, Work
from serve.runtime import Batches
from tests.generation_jobs import EIGHT, ONE, TWO, generate

STEP_S = 0.001  # of one lane
NO_BATCHES = cast(Batches, None)  # nothing runs here


def backlog(lanes: list[GenerateLane], max_rows: int, shared: bool = False) -> ModelBacklog:
    cost = Cost()
    for key in (ONE, TWO, EIGHT):
        cost.observe_usual((key, "decode"), key.steps * STEP_S)
    return ModelBacklog(cost, IDLE_ANSWER_S, lanes, max_rows, 0.0, shared)


def load(running: list[int], waiting: list[int], max_rows: int) -> LaneLoad:
    """One lane, told what is left to write of each; prompts of 8 tokens."""
    lane = GenerateLane(ONE, 1, NO_BATCHES)
    for left in running:
        lane.rows.append(written(left))
    for left in waiting:
        lane.add(written(left))
    return backlog([lane], max_rows)._loads[ONE]


def written(left: int) -> Job:
    return Job(ONE, Work(), (8,), 8 + left, tokens_left=left)


def simulated(running: list[int], waiting: list[int], max_rows: int) -> int:
    """Tokens until a place is free for one more; of those that wait, one begins a call at most."""
    rows, queue, calls = list(running), [left - 1 for left in waiting], 0
    while queue or len(rows) == max_rows:
        if queue and len(rows) < max_rows:
            rows.append(queue.pop(0))
        rows = [left - 1 for left in rows if left > 1]
        calls += 1
    return calls


def rounds(max_rows: int, shared: bool) -> Callable[[LaneKey], float]:
    """The time between two tokens of a lane, of three that are busy."""
    lanes = []
    for key in (ONE, TWO, EIGHT):
        lane = GenerateLane(key, key.steps, NO_BATCHES)
        for name in "ab":
            lane.add(generate(name, lane=key))
        lanes.append(lane)
    found = backlog(lanes, max_rows, shared)
    return lambda key: found._tokens_s(key, 1, 0, 0.0, 1.0)


def test_lanes_that_share_calls_have_as_many_evaluations_each() -> None:
    shared = rounds(max_rows=6, shared=True)
    for key in (ONE, TWO, EIGHT):
        assert shared(key) == pytest.approx(key.steps * 3 * STEP_S)


def test_lanes_that_take_turns_have_a_token_each_or_some_more() -> None:
    alternating = rounds(max_rows=6, shared=False)
    assert alternating(ONE) == pytest.approx((1 + 2 + 8) * STEP_S)
    assert (1 + 2 + 8) * STEP_S < alternating(EIGHT) < 8 * 3 * STEP_S


def test_lanes_that_do_not_fit_into_a_call_take_turns() -> None:
    both = [rounds(max_rows=5, shared=shared) for shared in (True, False)]
    assert both[0](EIGHT) == both[1](EIGHT)


@pytest.mark.parametrize("waiting", [16, 32, 64, 128])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_when_a_place_is_free_behind_many_that_wait(waiting: int, shared: bool, seed: int) -> None:
    chance = random.Random(seed)
    running = [32] * 16 if shared else [chance.randint(1, 32) for _ in range(16)]
    tokens = tokens_until_slot(load(running, [32] * waiting, 16), 16)
    assert tokens == pytest.approx(simulated(running, [32] * waiting, 16), rel=0.25)


def test_when_a_place_is_free_behind_few_that_wait() -> None:
    assert tokens_until_slot(load([5, 9, 3], [32], 4), 4) == 3
    assert tokens_until_slot(load([5, 9, 3, 7], [32], 4), 4) == 5
    assert tokens_until_slot(load([5, 9], [32], 4), 4) == 0.0


def test_rows_are_padded_to_the_longest() -> None:
    alone, many = (load([32] * rows, [], 16) for rows in (1, 15))
    assert alone.length == 8 + 16
    assert many.length == 8 + 30
