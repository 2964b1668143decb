"""A lane of beam searches: each is a batch of its own, and one step of one of them is a call.

It deliberately knows neither what a search does nor when a turn comes.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic

from serve.scheduler.job import Job, LaneKey, State, WorkT


class SearchLane(Generic[WorkT]):
    """Searches that wait, those that run in turn, and those whose memory is still to be freed."""

    def __init__(self, key: LaneKey, cache_bytes: Callable[[int, int], int]) -> None:
        self.key = key
        self.waiting: deque[Job[WorkT]] = deque()
        self.running: deque[Job[WorkT]] = deque()
        self._over: list[Job[WorkT]] = []
        self._cache_bytes = cache_bytes  # of so many rows of so many positions

    def occupants(self) -> list[Job[WorkT]]:
        """Whoever holds, or is promised, memory."""
        return [*self.running, *self._over]

    def charged_bytes(self, extra: Job[WorkT] | None = None) -> int:
        """The memory that this lane holds or may come to hold, with one more job or without."""
        jobs = self.occupants() if extra is None else [*self.occupants(), extra]
        return sum(self._cache_bytes(1, job.positions) for job in jobs)

    def add(self, job: Job[WorkT]) -> None:
        """The job waits behind those that do."""
        self.waiting.append(job)

    def enter(self, job: Job[WorkT]) -> None:
        """The job runs from now on, after those that do already."""
        self.running.append(job)

    def drop(self, job: Job[WorkT]) -> None:
        """The job has ended."""
        if job.state is State.QUEUED:
            self.waiting.remove(job)
        else:
            self.running.remove(job)
            self._over.append(job)

    def forget(self) -> tuple[Job[WorkT], ...]:
        """Those whose memory is to be freed now."""
        over, self._over = tuple(self._over), []
        return over

    def turn(self) -> Job[WorkT] | None:
        """Whose step comes next: each in turn."""
        if not self.running:
            return None
        self.running.rotate(-1)
        return self.running[-1]
