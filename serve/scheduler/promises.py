"""Turns promised to those that were refused: each is told to come when those before it have had
theirs, so that they do not all come back at once.

Told the time and the predicted waits; it deliberately knows neither who was refused nor whether
they come back. A turn whose time has passed is forgotten.
"""

from collections import deque


class Promises:
    """The turns of one queue."""

    def __init__(self, most_jobs: int) -> None:
        self._most_jobs = most_jobs  # beyond those that wait; all later ones share the last turn
        self._turns: deque[tuple[float, int]] = deque()  # when, and of how many jobs
        self._jobs = 0

    def turn_s(self, now_s: float, wait_s: float, each_s: float, jobs: int) -> float:
        """How long until the turn of so many more jobs, which is kept for them.

        All that is here will take `wait_s`, and then each that was promised a turn `each_s`.
        """
        while self._turns and self._turns[0][0] <= now_s:
            self._jobs -= self._turns.popleft()[1]
        told_s = wait_s + each_s * self._jobs
        if self._jobs + jobs <= self._most_jobs:
            self._turns.append((now_s + told_s, jobs))
            self._jobs += jobs
        return told_s
