"""How long the calls of each turn took lately: what goes on beside a request.

Averages that forget; it deliberately knows neither requests nor clocks.
"""

from serve.scheduler.job import Turn

_WEIGHT = 0.2  # of the newest call in the average of its kind


class CallTimes:
    """The recent time of a call, for each turn."""

    def __init__(self) -> None:
        self._seconds: dict[Turn, float] = {}

    def observe(self, turn: Turn, seconds: float) -> None:
        known = self._seconds.get(turn)
        self._seconds[turn] = seconds if known is None else known + _WEIGHT * (seconds - known)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._seconds = {turn: one for turn, one in self._seconds.items() if turn[0].model != model}

    def seconds(self, turn: Turn) -> float | None:
        """The average, or None if no such call has run yet."""
        return self._seconds.get(turn)
