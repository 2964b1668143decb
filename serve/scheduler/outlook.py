"""The outlook of a generation: when it could begin, and when its last token would come.

From the lanes as they are and the times that were observed. It deliberately knows neither HTTP nor
what is done about it.
"""

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import Job, LaneKey, WorkT
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
        self._lanes = {lane.key: lane for lane in lanes}
        self._rows = {
            key: min(max_rows, len(lane.occupants()) + len(lane.waiting))
            for key, lane in self._lanes.items()
        }
        self._latency = latency
        self._max_rows = max_rows
        self._usual_s = usual_s  # a token of a lane
        self._beside_s = beside_s  # other models, between two calls

    def token_s(self, key: LaneKey, rows: int, length: int) -> float:
        """A token of a lane, if so many rows decode together; 0 if nothing is known."""
        series = Series(key.model, "decode", key.steps)
        seconds = self._latency.call_s(series, rows, length)
        if seconds is None:
            seconds = self._usual_s(key)
        return 0.0 if seconds is None else seconds

    def alone_s(self, key: LaneKey, prompt: int, tokens: int, jobs: int = 1) -> float:
        """The time of a whole answer on an idle server; of so many that are asked for at once."""
        each_s = self.token_s(key, min(self._max_rows, jobs), prompt + tokens // 2)
        read_s = self._read_s(key, jobs * prompt, jobs)
        return read_s + self._rounds(jobs, tokens) * each_s + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, prompt: int, tokens: int, jobs: int = 1) -> float:
        """The time until the last token of all, asked for now; seldom longer."""
        length = prompt + tokens // 2
        read_s = self._unread_s() + self._read_s(key, jobs * prompt, jobs)
        writes_s = self._rounds(jobs, tokens) * self._round_s(key, length, key, jobs)
        work_s = self._place_s(key) + read_s + writes_s
        return work_s * self._latency.caution + self._latency.answer_s

    def late_s(
        self,
        key: LaneKey,
        prompt: int,
        tokens: int,
        jobs: int,
        given_s: float,
        now_s: float,
        share: float = 1.0,
    ) -> float:
        """By how much these would be late, asked for now, or one that they push back, at worst.

        Each is to take a share of the time that is left to it. Not above 0: in time. Who will be
        late in any case does not count.
        """
        late_s = self.ready_s(key, prompt, tokens, jobs) - share * given_s
        caution, unread_s = self._latency.caution, self._unread_s()
        more_s = unread_s + self._read_s(key, jobs * prompt, jobs)
        for one, lane in self._lanes.items():
            due = self._due(lane)
            if not due:
                continue
            length = due[0][0].positions // 2
            before_s = self._round_s(one, length)
            after_s = self._round_s(one, length, key, jobs)
            for job, due_s in due:
                left, left_s = job.tokens_left, due_s - now_s - self._latency.answer_s
                if caution * (unread_s + left * before_s) <= left_s:
                    late_s = max(late_s, caution * (more_s + left * after_s) - share * left_s)
        return late_s

    def wait_s(self, key: LaneKey) -> float:
        """The time until a place is free for one more of this lane, behind those that wait."""
        lane = self._lanes.get(key)
        if lane is None:
            return 0.0
        return self._place_s(key) + self._lane_unread_s(lane)

    def _place_s(self, key: LaneKey) -> float:
        """That time without the prompts that are read until then."""
        lane = self._lanes.get(key)
        if lane is None:
            return 0.0
        occupants, ahead = lane.occupants(), len(lane.waiting)
        free = self._max_rows - len(occupants)
        if ahead < free:
            return 0.0
        length = 1 + (occupants or lane.waiting)[0].positions // 2
        each_s = self._round_s(key, length)
        left = sorted(job.tokens_left for job in occupants)
        if ahead - free < len(left):
            return left[ahead - free] * each_s
        return (sum(left) + lane.waiting_tokens) / self._max_rows * each_s

    def _round_s(
        self, key: LaneKey, length: int, coming: LaneKey | None = None, jobs: int = 0
    ) -> float:
        """From one token of a lane to the next, with all its rows and those of other lanes.

        Fewer steps have a token more often: see Decoding.
        """
        rows = self._rows
        if coming is not None:
            rows = rows | {coming: min(self._max_rows, rows.get(coming, 0) + jobs)}
        seconds = self._beside_s
        for lane, count in rows.items():
            if count:
                often = max(1.0, math.sqrt(key.steps / lane.steps))
                seconds += often * self.token_s(lane, count, length)
        return seconds

    def _rounds(self, jobs: int, tokens: int) -> int:
        """Tokens come for all rows that there may be; the first is that of the prompt."""
        return -(-jobs // self._max_rows) * (tokens - 1)

    def _due(self, lane: GenerateLane[WorkT]) -> list[tuple[Job[WorkT], float]]:
        """Those of a lane that have a deadline, and run or are next."""
        jobs = *lane.occupants(), *islice(lane.waiting, self._max_rows)
        return [(job, job.deadline.ends_s) for job in jobs if job.deadline is not None]

    def _unread_s(self) -> float:
        """The time to read all prompts that are not read yet: tokens wait for each."""
        return sum(map(self._lane_unread_s, self._lanes.values()))

    def _lane_unread_s(self, lane: GenerateLane[WorkT]) -> float:
        tokens, prompts = lane.waiting_prompt_tokens, len(lane.waiting)
        if lane.reading is not None:
            tokens, prompts = tokens + lane.reading.lengths[0], prompts + 1
        return self._read_s(lane.key, tokens, prompts)

    def _read_s(self, key: LaneKey, tokens: int, prompts: int) -> float:
        """The time to read so many prompts of so many tokens in all, one after the other."""
        if not prompts:
            return 0.0
        series = Series(key.model, "prefill", key.steps)
        return prompts * (self._latency.call_s(series, 1, round(tokens / prompts)) or 0.0)
