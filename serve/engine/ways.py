"""Ways to write, tried while it is done: how far rows run ahead, and whether rungs share calls.

Knows which ways there are; what is quickest is found by trials.
"""

from serve.engine.trials import Trials
from serve.runtime.protocol import MOST_AHEAD
from serve.scheduler.job import LaneKey

# Under way at once, at most: with fewer, a position takes more steps before it drafts.
_POSITIONS = (MOST_AHEAD, MOST_AHEAD // 2)
_TRIAL_TOKENS, _CHOSEN_TOKENS = 32, 1024
_TRIAL_EVALUATIONS, _CHOSEN_EVALUATIONS = 1000, 30_000


class Ways:
    """What has been found so far."""

    def __init__(self) -> None:
        self._leads: dict[LaneKey, Trials[int]] = {}
        self._mixing: dict[str, Trials[bool]] = {}  # by model

    def leads(self, lane: LaneKey) -> Trials[int]:
        """How far a row of this lane runs ahead while it is alone."""
        if lane not in self._leads:
            self._leads[lane] = Trials(leads_of(lane.steps), _TRIAL_TOKENS, _CHOSEN_TOKENS)
        return self._leads[lane]

    def mixing(self, model: str) -> Trials[bool]:
        """Whether rungs of this model share calls."""
        if model not in self._mixing:
            self._mixing[model] = Trials((True, False), _TRIAL_EVALUATIONS, _CHOSEN_EVALUATIONS)
        return self._mixing[model]

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._leads = {lane: one for lane, one in self._leads.items() if lane.model != model}
        self._mixing.pop(model, None)


def leads_of(steps: int) -> tuple[int, ...]:
    """The steps before a draft that are worth a trial; 0 runs nothing ahead."""
    return (0, *sorted({-(-steps // most) for most in _POSITIONS})) if steps > 1 else (0,)
