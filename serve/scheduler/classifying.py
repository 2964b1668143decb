"""All lanes of classifications: which rows wait where, and what is predicted of a new request.

Knows neither generations nor whose turn it is; what those take is told as seconds.
"""

import math
from typing import Generic

from serve.scheduler.classify_lane import ClassifyLane
from serve.scheduler.job import ClassifyCall, Job, LaneKey, WorkT
from serve.scheduler.latency_model import LatencyModel
from serve.scheduler.limits import Limits
from serve.scheduler.price import Prices
from serve.scheduler.relief import Relief


class Classifying(Generic[WorkT]):
    """Lanes by their keys, opened when first needed."""

    def __init__(self, limits: Limits, latency: LatencyModel) -> None:
        self._limits = limits
        self._latency = latency
        self._lanes: dict[LaneKey, ClassifyLane[WorkT]] = {}

    def open(self, key: LaneKey) -> bool:
        """Have this lane; whether it is new."""
        if key in self._lanes:
            return False
        prices = Prices(self._latency, key, self._limits.batch_rows)
        relief = Relief(self._limits.degrade_wait_s)
        self._lanes[key] = ClassifyLane(
            key, prices, self._limits.batch_rows, self._limits.batch_tokens, relief
        )
        return True

    def close(self, model: str) -> None:
        """Have no lanes of this model any more. None of its rows waits."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if key.model != model}

    def add(self, job: Job[WorkT]) -> None:
        self._lanes[job.lane].add(job)

    def drop(self, job: Job[WorkT]) -> None:
        self._lanes[job.lane].drop(job)

    def take(self, key: LaneKey, now_s: float, beside_s: float) -> ClassifyCall[WorkT] | None:
        """The next call of a lane, if rows wait and need not wait for company."""
        lane = self._lanes[key]
        if not lane.waiting or self._wake_s(lane) > now_s:
            return None
        batch = lane.take(now_s, beside_s)
        return ClassifyCall(key, batch.rows, batch.steps, batch.seconds)

    def wake_s(self) -> float | None:
        """When the first batch will have waited long enough for company."""
        waiting = [lane for lane in self._lanes.values() if lane.waiting]
        return min(map(self._wake_s, waiting), default=None)

    def busy(self) -> list[LaneKey]:
        """The lanes in which rows wait."""
        return [key for key, lane in self._lanes.items() if lane.waiting]

    def hopeless(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs whose deadline cannot be met any more."""
        return [job for lane in self._lanes.values() for job in lane.hopeless(now_s)]

    def calls_ahead(self, key: LaneKey) -> int:
        """How many calls a new row of this lane would wait for, in its lane."""
        lane = self._lanes.get(key)
        return len(lane.waiting) // self._limits.batch_rows if lane else 0

    def alone_s(self, key: LaneKey, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of these rows on an idle server, until their answer has left."""
        return self._lanes[key].alone_s(steps, lengths)

    def least_late_s(self, key: LaneKey, steps: int, due_s: float, start_s: float) -> float:
        """By how much any job due then would be late at least, where it goes behind all others."""
        lane = self._lanes.get(key)
        return -math.inf if lane is None else lane.least_late_s(steps, due_s, start_s)

    def late_s(self, job: Job[WorkT], start_s: float, beside_s: float) -> float:
        """By how much a job with a deadline, or one that it pushes back, would be late at worst."""
        return self._lanes[job.lane].late_s(job, start_s, beside_s)

    def wait_s(self, least: bool) -> float:
        """How long until every row that waits has run, at the fewest steps or as it will be."""
        return sum(
            lane.wait_s(least) * self._latency.lasting(key.model)
            for key, lane in self._lanes.items()
            if lane.waiting
        )

    def _wake_s(self, lane: ClassifyLane[WorkT]) -> float:
        """When the lane's next batch will have waited long enough."""
        job = lane.waiting[0].job
        enough = len(lane.waiting) >= self._limits.batch_rows or job.deadline is not None
        return job.queued_s if enough else job.queued_s + self._limits.max_wait_s
