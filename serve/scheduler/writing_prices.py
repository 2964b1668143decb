"""What the calls take that write: prompts, tokens of rows that decode together, steps of searches.

A view of the latency model, as it is likely; 0 where nothing is known. Knows neither lanes nor
what else runs.
"""

from collections.abc import Callable

from serve.scheduler.job import LaneKey
from serve.scheduler.latency_model import LatencyModel, Line, Series


class WritingPrices:
    """Seconds of calls."""

    def __init__(self, latency: LatencyModel, usual_s: Callable[[LaneKey], float | None]) -> None:
        self._latency = latency
        self._usual_s = usual_s  # of a token, or of a step of a search

    def token(self, key: LaneKey, rows: int, series: Series | None = None) -> Line:
        """A token of so many rows of a lane; its series, if that is at hand."""
        series = series or Series(key.model, "decode", key.steps)
        return self._latency.decode_line(series, rows) or (self._usual_s(key) or 0.0, 0.0)

    def prompts_s(
        self, key: LaneKey, tokens: int, prompts: int, series: Series | None = None
    ) -> float:
        """The time to read so many prompts of so many tokens in all, one after the other."""
        series = series or Series(key.model, "prefill", key.steps)
        return prompts * (self._latency.call_s(series, 1, tokens // prompts) or 0.0)

    def search_s(self, key: LaneKey, source: int, tokens: int, beams: int) -> float:
        """All calls of a search; the first one reads its source."""
        steps_s = (tokens - 1) * self.search_call_s(key, beams, tokens // 2 + 1)
        return self.prompts_s(key, source, 1) + steps_s

    def search_call_s(self, key: LaneKey, beams: int, length: int) -> float:
        """One token more for all hypotheses, which are rows of this length."""
        searched = Series(key.model, "search", key.steps)
        decoded = Series(key.model, "decode", key.steps)  # which runs the same graph
        known = decoded if self._latency.knows(decoded) else searched
        if self._latency.knows_well(searched):
            known = searched
        return self._latency.call_s(known, beams, length) or self._usual_s(key) or 0.0
