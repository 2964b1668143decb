"""How long the calls of each turn took lately: what goes on beside a request, and `predicted_ms`.

Averages that forget; it deliberately knows neither requests nor clocks.
"""

from serve.scheduler.job import LaneKey, Turn

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

    def predict_s(
        self, lane: LaneKey, busy: list[Turn], calls_ahead: int, measured_s: float | None
    ) -> float | None:
        """The time until one call of this lane is over, if it were asked for now.

        Every busy turn gets one call a round, so the answer comes after as many rounds as the
        lane has calls ahead, and one more. `measured_s` stands in where no call has run yet.
        """
        own: Turn = (lane, "classify" if lane.kind == "classify" else "decode")
        own_s = self.seconds(own) or measured_s
        if own_s is None:
            return None
        round_s = own_s + sum(self.seconds(turn) or 0.0 for turn in busy if turn != own)
        return round_s * (calls_ahead + 1)
