"""Which models fail: those whose last call threw, until one of their calls succeeds.

While no request comes that would show it, a call of our own is due now and then. It deliberately
knows neither what a call computes nor what a failing model means for the server.
"""

from collections.abc import Callable
from dataclasses import dataclass

from serve.scheduler.job import LaneKey

_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CheckCall:
    """Run a call of our own where one threw."""

    lane: LaneKey


class Failing:
    """Written by the engine's thread, read by any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lanes: dict[str, LaneKey] = {}  # by model: where its last call threw; newest last
        self._due_s = 0.0

    @property
    def models(self) -> tuple[str, ...]:
        """The keys of the models that fail."""
        return tuple(self._lanes)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._lanes.pop(model, None)

    def threw(self, lane: LaneKey) -> None:
        """A call of this lane threw."""
        self._lanes.pop(lane.model, None)
        self._lanes[lane.model] = lane
        self._due_s = self._clock() + _AGAIN_S

    def worked(self, lane: LaneKey) -> None:
        """A call of this lane succeeded."""
        if self._lanes:
            self._lanes.pop(lane.model, None)

    def due(self, now_s: float) -> CheckCall | None:
        """What to try again now, if anything."""
        if not self._lanes or now_s < self._due_s:
            return None
        return CheckCall(next(iter(self._lanes.values())))
