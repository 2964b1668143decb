"""How often lanes have a token, as predicted for what they share."""

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.latency_model import LatencyModel
from serve.scheduler.rounds import Rounds
from serve.scheduler.writing_prices import WritingPrices
from tests.generation_jobs import EIGHT, ONE, TWO, generate

STEP_S = 0.001  # of one lane


def rounds(max_rows: int, together: bool) -> Rounds[str]:
    lanes = []
    for key in (ONE, TWO, EIGHT):
        lane: GenerateLane[str] = GenerateLane(key, key.steps, max_rows, lambda rows, positions: 0)
        for name in "ab":
            lane.add(generate(name, lane=key))
        lanes.append(lane)
    prices = WritingPrices(LatencyModel(), lambda key: key.steps * STEP_S)
    return Rounds(lanes, prices, max_rows, 0.0, together)


def test_lanes_that_share_calls_have_as_many_evaluations_each() -> None:
    together = rounds(max_rows=6, together=True)
    for steps in (1, 2, 8):
        assert together.round(steps) == (steps * 3 * STEP_S, 0.0)


def test_lanes_that_take_turns_have_a_token_each_or_some_more() -> None:
    turns = rounds(max_rows=6, together=False)
    assert turns.round(1) == ((1 + 2 + 8) * STEP_S, 0.0)
    seconds, _ = turns.round(8)
    assert (1 + 2 + 8) * STEP_S < seconds < 8 * 3 * STEP_S


def test_lanes_that_do_not_fit_into_a_call_take_turns() -> None:
    both = [rounds(max_rows=5, together=together) for together in (True, False)]
    assert both[0].round(8) == both[1].round(8)
