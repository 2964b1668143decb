"""The outlook of a generation: when it could begin, and when its last token would come.

From the lanes as they are and the times that were observed. It deliberately knows neither HTTP nor
deadlines; who asks compares.
"""

from collections.abc import Callable, Iterable
from typing import Generic

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import LaneKey, WorkT
from serve.scheduler.latency_model import IDLE_ANSWER_S, LatencyModel, Series


class Outlook(Generic[WorkT]):
    """Predicts for one model that writes."""

    def __init__(
        self,
        lanes: Iterable[GenerateLane[WorkT]],
        latency: LatencyModel,
        max_rows: int,
        usual_s: Callable[[LaneKey], float | None],
        beside_s: float,
    ) -> None:
        self._lanes = list(lanes)
        self._latency = latency
        self._max_rows = max_rows
        self._usual_s = usual_s  # a token of a lane
        self._beside_s = beside_s  # other models, between two calls

    def token_s(self, key: LaneKey, rows: int, length: int) -> float:
        """From one token to the next, if so many rows decode together; 0 if nothing is known."""
        series = Series(key.model, "decode", key.steps)
        seconds = self._latency.call_s(series, rows, length)
        if seconds is None:
            seconds = self._usual_s(key)
        return 0.0 if seconds is None else seconds

    def alone_s(self, key: LaneKey, prompt: int, tokens: int) -> float:
        """The time of a whole answer on an idle server."""
        read_s = self._latency.call_s(Series(key.model, "prefill", key.steps), 1, prompt) or 0.0
        each_s = self.token_s(key, 1, prompt + tokens // 2)
        return read_s + (tokens - 1) * each_s + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, prompt: int, tokens: int) -> float:
        """The time until its last token, asked for now."""
        rows = min(self._max_rows, 1 + sum(len(lane.occupants()) for lane in self._lanes))
        read_s = self._latency.call_s(Series(key.model, "prefill", key.steps), 1, prompt) or 0.0
        each_s = self.token_s(key, rows, prompt + tokens // 2) + self._beside_s
        work_s = read_s + (tokens - 1) * each_s
        return self.wait_s(key) + work_s * self._latency.caution + self._latency.answer_s

    def wait_s(self, key: LaneKey) -> float:
        """The time until a place is free for one more of this lane, behind those that wait."""
        lane = next((one for one in self._lanes if one.key == key), None)
        if lane is None:
            return 0.0
        running = sorted(job.tokens_left for job in lane.occupants())
        free = self._max_rows - len(running)
        ahead = len(lane.waiting)
        if not running or ahead < free:
            return 0.0
        each_s = self.token_s(key, len(running), 1 + lane.occupants()[0].positions // 2)
        each_s += self._beside_s
        if ahead - free < len(running):
            return running[ahead - free] * each_s
        total = sum(running) + sum(job.tokens_left for job in lane.waiting)
        return total / self._max_rows * each_s
