"""Ways to write, tried while it is done: how far rows run ahead, and how rungs share the cores.

Knows which ways there are; what is quickest is found by trials.
"""

import math

from serve.engine.runner import Runner
from serve.engine.trials import Trials
from serve.runtime.protocol import MOST_AHEAD
from serve.scheduler.job import LaneKey, Sharing

# Under way at once, at most: with fewer, a position takes more steps before it drafts.
_POSITIONS = (MOST_AHEAD, MOST_AHEAD // 2)
_TRIAL_TOKENS, _CHOSEN_TOKENS, _TOKENS_PATIENCE, _TOKENS_ROUNDS = 64, 1024, 8, 9
# Of the time of plain decoding: where running ahead gains less it may as well lose.
_WORTH_RUNNING_AHEAD = 0.08
_TRIAL_WORTH, _CHOSEN_WORTH = 1300, 40_000
_LONG_COUNTS = 1 / 8  # an evaluation of M steps counts M to the power of this


class Ways:
    """What has been found so far."""

    def __init__(self) -> None:
        self._leads: dict[LaneKey, Trials[int]] = {}
        self._sharing: dict[str, Trials[Sharing]] = {}  # by model

    def leads(self, lane: LaneKey) -> Trials[int]:
        """How far a row of this lane runs ahead while it is alone."""
        if lane not in self._leads:
            self._leads[lane] = Trials(
                leads_of(lane.steps),
                _TRIAL_TOKENS,
                _CHOSEN_TOKENS,
                _TOKENS_PATIENCE,
                _WORTH_RUNNING_AHEAD,
                _TOKENS_ROUNDS,
            )
        return self._leads[lane]

    def sharing(self, lane: LaneKey, runner: Runner) -> Trials[Sharing]:
        """How the rungs of this lane's model decode."""
        if lane.model not in self._sharing:
            most_lanes, sides = runner.most_lanes(lane), runner.sides(lane)
            ways: tuple[Sharing, ...] = ("turns",)
            if most_lanes > 1:  # and on several cores no turn is quicker than to go abreast
                ways = ("together", "abreast" if sides > 1 else "turns")
            self._sharing[lane.model] = Trials(ways, _TRIAL_WORTH, _CHOSEN_WORTH)
        return self._sharing[lane.model]

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._leads = {lane: one for lane, one in self._leads.items() if lane.model != model}
        self._sharing.pop(model, None)


def leads_of(steps: int) -> tuple[int, ...]:
    """The steps before a draft that are worth a trial; 0 runs nothing ahead."""
    return (0, *sorted({-(-steps // most) for most in _POSITIONS})) if steps > 1 else (0,)


def worth(lane: LaneKey, evaluations: int) -> float:
    """What so many evaluations count for where ways to share the cores are compared.

    More where a token takes more of them: else the way that fills the cores with tokens of few
    steps would win, however much those of many, who wait longest anyway, pay for it.
    """
    return evaluations * math.pow(lane.steps, _LONG_COUNTS)
