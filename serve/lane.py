"""Lanes: the work of one rung of one model, and which of it runs together next.

A classification lane forms batches of rows of like length; a generation lane keeps the order of
the rows in its decode batch. It deliberately knows neither other lanes nor time: whose turn it is,
and whether there is cache memory for one more, is the scheduler's business.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic

from serve.job import Job, State, WorkT

# A row joins a batch while the padding stays below this share of the real tokens, or below this
# many tokens, where the cost of a call of its own would be larger than that of the padding.
_PADDING_SHARE = 0.25
_PADDING_TOKENS = 64
# How far beyond a full batch to look for rows of like length.
_WINDOW_BATCHES = 4


class ClassifyLane(Generic[WorkT]):
    """Rows waiting to be classified, oldest first."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Job[WorkT], int]] = deque()

    def add(self, job: Job[WorkT]) -> None:
        self.waiting.extend((job, row) for row in range(len(job.lengths)))

    def drop(self, job: Job[WorkT]) -> None:
        self.waiting = deque(entry for entry in self.waiting if entry[0] is not job)

    def take(self, max_rows: int, max_tokens: int) -> tuple[tuple[Job[WorkT], int], ...]:
        """The oldest row and those that go well with it: none can be passed over for ever."""
        window = [
            self.waiting.popleft()
            for _ in range(min(len(self.waiting), max_rows * _WINDOW_BATCHES))
        ]
        oldest = _tokens(window[0])
        chosen = {0}
        real = longest = oldest
        by_likeness = sorted(
            range(1, len(window)), key=lambda index: abs(_tokens(window[index]) - oldest)
        )
        for index in by_likeness:
            if len(chosen) == max_rows:
                break
            tokens = _tokens(window[index])
            if tokens != oldest and not window[index][0].may_pad:
                continue
            padded = (len(chosen) + 1) * max(longest, tokens)
            padding = padded - real - tokens
            if padded > max_tokens or padding > max(_PADDING_TOKENS, _PADDING_SHARE * real):
                continue
            chosen.add(index)
            real += tokens
            longest = max(longest, tokens)
        left = [entry for index, entry in enumerate(window) if index not in chosen]
        self.waiting.extendleft(reversed(left))
        return tuple(window[index] for index in sorted(chosen))


class GenerateLane(Generic[WorkT]):
    """Generations waiting, those that must be read in again, and the rows of the decode batch."""

    def __init__(self, cache_bytes: Callable[[int, int], int]) -> None:
        self.waiting: deque[Job[WorkT]] = deque()
        self.returning: deque[Job[WorkT]] = deque()
        self.rows: list[Job[WorkT]] = []
        self.held_bytes = 0  # by the buffers of the batch, idle rows included
        self._cache_bytes = cache_bytes  # of so many rows of so many positions
        self._most_rows = 0  # since the lane was last empty

    def occupants(self) -> list[Job[WorkT]]:
        """Whoever holds, or is promised, cache memory. A row that left and returns counts once."""
        return [*self.rows, *(job for job in self.returning if job not in self.rows)]

    def drop(self, job: Job[WorkT]) -> None:
        """The job has ended; a row that it has goes with the next eviction."""
        if job.state is State.QUEUED:
            self.waiting.remove(job)
        elif job in self.returning:
            self.returning.remove(job)

    def enter(self, job: Job[WorkT]) -> None:
        """The job takes the last row."""
        most = self._most_rows if self.occupants() else 0
        self.rows.append(job)
        self._most_rows = max(most, len(self.occupants()))

    def charged_bytes(self, extra: Job[WorkT] | None = None) -> int:
        """The most memory this lane holds or may come to hold, with one more job or without.

        All rows are as long as the longest, and buffers may keep the rows that they once had.
        """
        inside = self.occupants()
        jobs = inside if extra is None else [*inside, extra]
        if not jobs:
            return self.held_bytes
        rows = max(self._most_rows if inside else 0, len(jobs))
        positions = max(job.positions for job in jobs)
        return max(self.held_bytes, self._cache_bytes(rows, positions))

    def evict(self) -> tuple[int, ...]:
        """Drop rows that ended or wait to return, the last row taking the place of each.

        The indices are to be applied in order to the batch that these rows mirror.
        """
        evicted = []
        row = 0
        while row < len(self.rows):
            job = self.rows[row]
            if job.state is State.ENDED or job in self.returning:
                self.rows[row] = self.rows[-1]
                self.rows.pop()
                evicted.append(row)
            else:
                row += 1
        return tuple(evicted)


def _tokens(entry: tuple[Job[WorkT], int]) -> int:
    job, row = entry
    return job.lengths[row]
