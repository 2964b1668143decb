"""A generation lane: the rows of one rung of one model, from their prompts to their last tokens.

Rows join and leave between two tokens only. It deliberately knows neither other lanes nor time, nor
whether there is memory for one more.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic

from serve.scheduler.job import DecodePart, Job, LaneKey, State, WorkT
from serve.scheduler.latency_model import Series


class GenerateLane(Generic[WorkT]):
    """Generations that wait, whose prompts are read, and that decode together."""

    def __init__(
        self,
        key: LaneKey,
        calls_a_token: int,
        max_rows: int,
        cache_bytes: Callable[[int, int], int],
    ) -> None:
        self.key = key
        self.decode_series = Series(key.model, "decode", key.steps)
        self.prefill_series = Series(key.model, "prefill", key.steps)
        self.calls_a_token = calls_a_token
        self.waiting: deque[Job[WorkT]] = deque()
        self.waiting_prompt_tokens = self.waiting_tokens = 0  # of those, to read and to write
        self.returning: deque[Job[WorkT]] = deque()  # to be read in again
        self.reading: Job[WorkT] | None = None
        self.joining: list[Job[WorkT]] = []  # read, and not yet a row
        self.rows: list[Job[WorkT]] = []  # as they lie in the batch
        self.calls = 0  # that the present token has had
        self.due = 0.0  # the call in which it may take part again
        self.held_bytes = 0  # by the buffers of the batch, idle rows included
        self._over: list[Job[WorkT]] = []  # whose reading is to be forgotten
        self._cache_bytes = cache_bytes  # of so many rows of so many positions
        self._most_rows = 0  # since the lane was last empty
        self._max_rows = max_rows
        # Asked for whenever a request comes, and seldom changed by one; None: to be found again.
        self._next_due: list[Job[WorkT]] | None = None
        self._pressing: list[Job[WorkT]] = []

    @property
    def idle(self) -> bool:
        """Whether there is no row to decode, now or after the next call."""
        return not self.rows and not self.joining

    @property
    def may_read(self) -> bool:
        """Whether the next prompt may be begun: one at a time, so that memory is for one."""
        return self.reading is None and not self.joining

    def occupants(self) -> list[Job[WorkT]]:
        """Whoever holds, or is promised, cache memory. A row that left and returns counts once."""
        one = [] if self.reading is None else [self.reading]
        if not (self.returning or self._over):
            return [*self.rows, *self.joining, *one]
        again = [job for job in self.returning if job not in (*self.rows, *self._over)]
        return [*self.rows, *self.joining, *one, *again, *self._over]

    @property
    def next_due(self) -> list[Job[WorkT]]:
        """Those with a deadline, of as many that wait as may run together."""
        if self._next_due is None:
            self._next_due = self._find_due()
        return self._next_due

    @property
    def pressing(self) -> list[Job[WorkT]]:
        """Those of them that are late first, whatever a token takes."""
        if self._next_due is None:
            self._next_due = self._find_due()
        return self._pressing

    def add(self, job: Job[WorkT]) -> None:
        """The job waits behind those that do."""
        self.waiting.append(job)
        self._count(job, 1)

    def take(self) -> Job[WorkT]:
        """The job that has waited longest waits no more."""
        job = self.waiting.popleft()
        self._count(job, -1)
        return job

    def drop(self, job: Job[WorkT]) -> None:
        """The job has ended; a row that it has goes with the next eviction."""
        if job is self.reading:
            self.reading = None
            self._over.append(job)
        elif job in self.joining:
            self.joining.remove(job)
            self._over.append(job)
        elif job in self.returning:
            self.returning.remove(job)
        elif job not in self.rows:
            self.waiting.remove(job)
            self._count(job, -1)

    def read(self, job: Job[WorkT]) -> None:
        """Begin to read the job's prompt."""
        assert self.may_read
        most = self._most_rows if self.occupants() else 0
        self.reading = job
        self._most_rows = max(most, len(self.occupants()))

    def has_read(self, full: bool) -> None:
        """The prompt has been read: it becomes a row before the next token, unless it is full."""
        job, self.reading = self.reading, None
        assert job is not None
        if full:
            self._over.append(job)
            self.returning.append(job)
        else:
            self.joining.append(job)

    def forget(self) -> tuple[int, ...]:
        """The jobs whose reading is to be forgotten now."""
        over, self._over = self._over, []
        return tuple(job.number for job in over)

    def charged_bytes(self, extra: Job[WorkT] | None = None) -> int:
        """The most memory this lane holds or may come to hold, with one more job or without.

        All rows are as long as the longest, and buffers may keep the rows that they once had. A
        prompt is read beside the rows, and only then copied to them.
        """
        inside = self.occupants()
        jobs = inside if extra is None else [*inside, extra]
        if not jobs:
            return self.held_bytes
        rows = max(self._most_rows if inside else 0, len(jobs))
        positions = max(job.positions for job in jobs)
        beside = self._cache_bytes(1, positions) if rows > 1 else 0
        return max(self.held_bytes, self._cache_bytes(rows, positions)) + beside

    @property
    def dead(self) -> bool:
        """Whether nobody waits any more for a token that is under way."""
        return self.calls > 0 and all(job.state is State.ENDED for job in self.rows)

    def token(self) -> DecodePart[WorkT]:
        """A whole token for every row."""
        evict, join = self._change()
        return DecodePart(self.key, evict, join, tuple(self.rows))

    def part(self, calls: int = 1, side: int = 0) -> DecodePart[WorkT]:
        """The next calls of the token that is under way, or the first of the next one."""
        assert self.calls + calls <= self.calls_a_token
        evict, join = self._change() if self.calls == 0 else ((), ())
        begins = self.calls == 0
        if self.rows:
            self.calls = (self.calls + calls) % self.calls_a_token
        ends = self.calls == 0
        return DecodePart(
            self.key, evict, join, tuple(self.rows), begins, ends, calls=calls, side=side
        )

    def lose(self) -> DecodePart[WorkT]:
        """Drop the batch, in which nobody waits for anything."""
        self.abandon()
        return DecodePart(self.key, (), (), (), lost=True)

    def _find_due(self) -> list[Job[WorkT]]:
        first = islice(self.waiting, self._max_rows)
        due = [job for job in first if job.ends_s < math.inf]
        self._pressing = _pressing(due)
        return due

    def _count(self, job: Job[WorkT], jobs: int) -> None:
        self.waiting_prompt_tokens += jobs * job.lengths[0]
        self.waiting_tokens += jobs * job.tokens_left
        if jobs < 0 or len(self.waiting) <= self._max_rows:
            self._next_due = None

    def _change(self) -> tuple[tuple[int, ...], tuple[Job[WorkT], ...]]:
        """Who leaves and who joins before the next token."""
        evict, join = self.evict(), tuple(self.joining)
        self.rows += self.joining
        self.joining = []
        return evict, join

    def evict(self) -> tuple[int, ...]:
        """Drop rows that ended or wait to return, the last row taking the place of each.

        The indices are to be applied in order to the batch that these rows mirror.
        """
        assert self.calls == 0, "a row leaves between two tokens"
        if not self.returning and all(job.state is not State.ENDED for job in self.rows):
            return ()
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

    def abandon(self) -> None:
        """The batch is lost, with all its rows. Their jobs must have ended."""
        assert all(job.state is State.ENDED for job in self.rows)
        self.rows.clear()
        self.calls = self.held_bytes = 0


def _pressing(jobs: Iterable[Job[WorkT]]) -> list[Job[WorkT]]:
    """All but those that another has less time than, for as many tokens or more."""
    found: list[Job[WorkT]] = []
    for job in sorted(jobs, key=lambda job: (job.ends_s, -job.tokens_left)):
        if not found or job.tokens_left > found[-1].tokens_left:
            found.append(job)
    return found
