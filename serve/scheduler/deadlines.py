"""The deadlines of all jobs that have one, the next one first. Knows no lanes and no clock."""

from heapq import heappop, heappush
from typing import Generic

from serve.scheduler.job import Job, State, WorkT


class Deadlines(Generic[WorkT]):
    """Which jobs are late; jobs that have ended are forgotten by and by."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job[WorkT]]] = []

    @property
    def next_s(self) -> float | None:
        """The next deadline, of a job that may have ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, job: Job[WorkT]) -> None:
        """Watch over a numbered job, if it has a deadline."""
        if job.deadline is not None:
            heappush(self._heap, (job.deadline.ends_s, job.number, job))

    def passed(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs that have not ended in time; each is named once."""
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            job = heappop(self._heap)[2]
            if job.state is not State.ENDED:
                late.append(job)
        return late
