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

    def alone_s(self, key: LaneKey, prompt: int, tokens: int, jobs: int = 1) -> float:
        """The time of a whole answer on an idle server; of so many that are asked for at once."""
        each_s = self.token_s(key, min(self._max_rows, jobs), prompt + tokens // 2)
        return self._work_s(key, prompt, tokens, jobs, each_s) + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, prompt: int, tokens: int, jobs: int = 1) -> float:
        """The time until the last token of all, asked for now."""
        rows = min(self._max_rows, jobs + sum(len(lane.occupants()) for lane in self._lanes))
        each_s = self.token_s(key, rows, prompt + tokens // 2) + self._beside_s
        work_s = self._work_s(key, prompt, tokens, jobs, each_s)
        return self.wait_s(key) + work_s * self._latency.caution + self._latency.answer_s

    def wait_s(self, key: LaneKey) -> float:
        """The time until a place is free for one more of this lane, behind those that wait."""
        lane = next((one for one in self._lanes if one.key == key), None)
        if lane is None:
            return 0.0
        occupants, ahead = lane.occupants(), len(lane.waiting)
        free = self._max_rows - len(occupants)
        read_s = self._read_s(key, sum(job.lengths[0] for job in lane.waiting), ahead)
        if ahead < free:
            return read_s
        positions = (occupants or list(lane.waiting))[0].positions
        each_s = self.token_s(key, self._max_rows, 1 + positions // 2) + self._beside_s
        left = sorted(job.tokens_left for job in occupants)
        if ahead - free < len(left):
            return read_s + left[ahead - free] * each_s
        total = sum(left) + sum(job.tokens_left for job in lane.waiting)
        return read_s + total / self._max_rows * each_s

    def _work_s(self, key: LaneKey, prompt: int, tokens: int, jobs: int, each_s: float) -> float:
        """Prompts are read one after the other; tokens come for all rows that there may be."""
        read_s = self._read_s(key, jobs * prompt, jobs)
        return read_s + -(-jobs // self._max_rows) * (tokens - 1) * each_s

    def _read_s(self, key: LaneKey, tokens: int, prompts: int) -> float:
        """The time to read so many prompts of so many tokens in all."""
        if not prompts:
            return 0.0
        series = Series(key.model, "prefill", key.steps)
        return prompts * (self._latency.call_s(series, 1, round(tokens / prompts)) or 0.0)
