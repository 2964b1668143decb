"""The queues and batches of generations and beam searches, and the KV cache memory they take.

The life of a generation, whose rows join and leave the batch between two tokens only:

    waiting -> prefilling -> joining -> row of the batch -> ended
                   ^                         |
                   +------- requeued <-------+   its cache is full: its last tokens go on
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic

from serve.engine.cost import CostKey
from serve.engine.job import DecodeCall, DecodePart, Job, LaneKey, Limits, Sharing, State, WorkT


class GenerateLane(Generic[WorkT]):
    """One rung's generations: those that wait, the one in prefill, and the rows of the batch."""

    def __init__(
        self,
        key: LaneKey,
        calls_a_token: int,
        max_rows: int,
        cache_bytes: Callable[[int, int], int],
    ) -> None:
        self.key = key
        self.decode_cost_key = CostKey(key.model, "decode", key.steps)
        self.prefill_cost_key = CostKey(key.model, "prefill", key.steps)
        self.calls_a_token = calls_a_token
        self.waiting: deque[Job[WorkT]] = deque()
        # Of the waiting ones: to prefill and to generate.
        self.waiting_prompt_tokens = self.waiting_tokens = 0
        self.requeued: deque[Job[WorkT]] = deque()  # to be prefilled again
        self.prefilling: Job[WorkT] | None = None
        self.joining: list[Job[WorkT]] = []  # prefilled, to become rows before the next token
        self.rows: list[Job[WorkT]] = []  # in the order of the batch
        self.calls = 0  # made for the present token
        self.due = 0.0  # the call from which the lane may take part again
        self.held_bytes = 0  # by the batch's buffers, idle rows included
        self._over: list[Job[WorkT]] = []  # jobs whose prefill is to be freed
        self._cache_bytes = cache_bytes  # for (rows, positions)
        self._most_rows = 0  # since the lane was last empty
        self._max_rows = max_rows
        # Asked on every request and seldom changed; None: compute again.
        self._next_due: list[Job[WorkT]] | None = None
        self._urgent: list[Job[WorkT]] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to decode, now or after the next call."""
        return not self.rows and not self.joining

    @property
    def may_prefill(self) -> bool:
        """Whether a prefill may begin. One at a time, so that one prompt's memory is enough."""
        return self.prefilling is None and not self.joining

    def occupants(self) -> list[Job[WorkT]]:
        """Jobs that hold or were promised cache memory. A row that left to return counts once."""
        one = [] if self.prefilling is None else [self.prefilling]
        if not (self.requeued or self._over):
            return [*self.rows, *self.joining, *one]
        again = [job for job in self.requeued if job not in (*self.rows, *self._over)]
        return [*self.rows, *self.joining, *one, *again, *self._over]

    @property
    def next_due(self) -> list[Job[WorkT]]:
        """The waiting jobs with a deadline among the next batchful."""
        if self._next_due is None:
            self._next_due = self._find_due()
        return self._next_due

    @property
    def urgent(self) -> list[Job[WorkT]]:
        """The most urgent of those: whatever a token takes, one of them is late first."""
        if self._next_due is None:
            self._next_due = self._find_due()
        return self._urgent

    def add(self, job: Job[WorkT]) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)
        self._count(job, 1)

    def take(self) -> Job[WorkT]:
        """Take the oldest job off the queue."""
        job = self.waiting.popleft()
        self._count(job, -1)
        return job

    def drop(self, job: Job[WorkT]) -> None:
        """The job has ended. If it is a row, it leaves with the next eviction."""
        if job is self.prefilling:
            self.prefilling = None
            self._over.append(job)
        elif job in self.joining:
            self.joining.remove(job)
            self._over.append(job)
        elif job in self.requeued:
            self.requeued.remove(job)
        elif job not in self.rows:
            self.waiting.remove(job)
            self._count(job, -1)

    def read(self, job: Job[WorkT]) -> None:
        """Begin the job's prefill."""
        assert self.may_prefill
        most = self._most_rows if self.occupants() else 0
        self.prefilling = job
        self._most_rows = max(most, len(self.occupants()))

    def prefilled(self, full: bool) -> None:
        """The prefill is done: the job joins before the next token, unless its cache is full."""
        job, self.prefilling = self.prefilling, None
        assert job is not None
        if full:
            self._over.append(job)
            self.requeued.append(job)
        else:
            self.joining.append(job)

    def forget(self) -> tuple[int, ...]:
        """Numbers of the jobs whose prefill is to be freed now."""
        over, self._over = self._over, []
        return tuple(job.number for job in over)

    def charged_bytes(self, extra: Job[WorkT] | None = None) -> int:
        """The most memory that this lane holds or may come to hold, optionally with one more job.

        All rows are as long as the longest, and buffers keep the size they once had. A prompt is
        prefilled beside the batch and then copied into it.
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
        """Whether all rows have ended while a token is under way."""
        return self.calls > 0 and all(job.state is State.ENDED for job in self.rows)

    def token(self) -> DecodePart[WorkT]:
        """A whole token for every row."""
        evict, join = self._change()
        return DecodePart(self.key, evict, join, tuple(self.rows))

    def part(self, calls: int = 1, side: int = 0) -> DecodePart[WorkT]:
        """The next calls of the token that is under way, or the first calls of the next one."""
        assert self.calls + calls <= self.calls_a_token
        evict, join = self._change() if self.calls == 0 else ((), ())
        begins = self.calls == 0
        if self.rows:
            self.calls = (self.calls + calls) % self.calls_a_token
        ends = self.calls == 0
        return DecodePart(
            self.key, evict, join, tuple(self.rows), begins, ends, calls=calls, side=side
        )

    def drop_dead_batch(self) -> DecodePart[WorkT]:
        """Drop the batch; all its rows have ended."""
        self.drop_batch()
        return DecodePart(self.key, (), (), (), lost=True)

    def _find_due(self) -> list[Job[WorkT]]:
        first = islice(self.waiting, self._max_rows)
        due = [job for job in first if job.ends_s < math.inf]
        self._urgent = _urgent(due)
        return due

    def _count(self, job: Job[WorkT], jobs: int) -> None:
        self.waiting_prompt_tokens += jobs * job.lengths[0]
        self.waiting_tokens += jobs * job.tokens_left
        if jobs < 0 or len(self.waiting) <= self._max_rows:
            self._next_due = None

    def _change(self) -> tuple[tuple[int, ...], tuple[Job[WorkT], ...]]:
        """Rows that leave and jobs that join before the next token."""
        evict, join = self.evict(), tuple(self.joining)
        self.rows += self.joining
        self.joining = []
        return evict, join

    def evict(self) -> tuple[int, ...]:
        """Remove rows that ended or are to return; the last row takes the place of each.

        The indices must be applied to the runtime's batch in the same order.
        """
        assert self.calls == 0, "a row leaves between two tokens"
        if not self.requeued and all(job.state is not State.ENDED for job in self.rows):
            return ()
        evicted = []
        row = 0
        while row < len(self.rows):
            job = self.rows[row]
            if job.state is State.ENDED or job in self.requeued:
                self.rows[row] = self.rows[-1]
                self.rows.pop()
                evicted.append(row)
            else:
                row += 1
        return tuple(evicted)

    def drop_batch(self) -> None:
        """The batch is lost. All its jobs must have ended."""
        assert all(job.state is State.ENDED for job in self.rows)
        self.rows.clear()
        self.calls = self.held_bytes = 0


def _urgent(jobs: Iterable[Job[WorkT]]) -> list[Job[WorkT]]:
    """The jobs that have less time than any other with as many tokens or more."""
    found: list[Job[WorkT]] = []
    for job in sorted(jobs, key=lambda job: (job.ends_s, -job.tokens_left)):
        if not found or job.tokens_left > found[-1].tokens_left:
            found.append(job)
    return found


# How the rungs of one model share the machine. They may share calls of the one-step graph, or run
# in parallel on a thread each until all meet again. A row of M steps needs M calls for a token.
# Equal turns would make many steps slow; a token for each row in turn would make few steps wait for
# many. So a rung of M steps gets tokens about sqrt(L / M) times as often as the longest rung, of L
# steps. Where a shared call has room left, other rungs join it. Parallel rungs have no such room,
# and get the cube root.


_MEETINGS = 2  # of parallel rungs per token of the longest
_BESIDE_ROWS = 1  # fixed cost of a call, in rows
_PARALLEL_SHARE = 2 / 3  # calls of M steps go with M to this power


class DecodeLanes(Generic[WorkT]):
    """The generate lanes of one model, and which of them decode in the next call.

    Each is due again after as many calls as its share allows.
    """

    def __init__(self, most_lanes: int, sides: int) -> None:
        self.most_lanes = most_lanes  # that may share a call
        self.sides = sides  # that may run in parallel
        self.sharing: Sharing = "shared" if most_lanes > 1 else "alternating"
        self._lanes: dict[LaneKey, GenerateLane[WorkT]] = {}
        self._readers: deque[GenerateLane[WorkT]] = deque()
        self._calls = 0.0
        self._active: list[GenerateLane[WorkT]] = []

    def __iter__(self) -> Iterator[GenerateLane[WorkT]]:
        return iter(self._lanes.values())

    def open(self, lane: GenerateLane[WorkT]) -> None:
        self._lanes[lane.key] = lane
        self._readers.append(lane)

    def readers(self) -> Iterator[GenerateLane[WorkT]]:
        """The lanes in the order in which they may prefill; the last one asked goes to the end."""
        for _ in range(len(self._readers)):
            self._readers.rotate(-1)
            yield self._readers[-1]

    def share(self, sharing: Sharing) -> None:
        """Change how rungs share the machine; no lane keeps a lead from before."""
        if sharing != self.sharing:
            self.sharing = sharing
            self._calls = min((lane.due for lane in self._lanes.values()), default=self._calls)
            for lane in self._lanes.values():
                lane.due = self._calls

    def decode(self, most_rows: int) -> DecodeCall[WorkT] | None:
        """The next decode call."""
        lanes = [lane for lane in self._lanes.values() if not lane.idle]
        self._activate(lanes)
        if not lanes:
            return None
        dead = [lane for lane in lanes if lane.dead]
        if dead:
            return DecodeCall(tuple(lane.drop_dead_batch() for lane in dead))
        if len(lanes) == 1 and lanes[0].calls == 0:
            return DecodeCall((lanes[0].token(),))
        if self.sharing == "alternating":
            return DecodeCall((self._turn(lanes),), len(lanes) > 1)
        if self.sharing == "parallel" and len(lanes) > 1:
            return DecodeCall(self._parallel(lanes), contended=True, parallel=True)
        longest = max(lane.calls_a_token for lane in lanes)
        chosen = self._fitting(lanes, most_rows)
        latest = _latest(lanes[0], longest)
        for lane in chosen:
            lane.due = min(lane.due + 1 / _share(lane.calls_a_token, longest), latest)
        self._calls += 1
        return DecodeCall(tuple(lane.part() for lane in chosen), len(lanes) > 1)

    def _turn(self, lanes: list[GenerateLane[WorkT]]) -> DecodePart[WorkT]:
        """A whole token of the lane that is due, once no token is under way."""
        first = min(lanes, key=lambda lane: (lane.calls == 0, lane.due))
        if first.calls:
            return first.part()
        first.due += 1
        return first.token()

    def _parallel(self, lanes: list[GenerateLane[WorkT]]) -> tuple[DecodePart[WorkT], ...]:
        """As many calls of each lane as fill all sides equally, most overdue lane first."""
        lanes.sort(key=lambda lane: lane.due)
        self._calls = max(self._calls, lanes[0].due)
        longest = max(lane.calls_a_token for lane in lanes)
        latest = _latest(lanes[0], longest)
        most = max(1, longest // _MEETINGS)
        wanted = [min(most, lane.calls_a_token - lane.calls) for lane in lanes]
        costs = [len(lane.rows) + len(lane.joining) + _BESIDE_ROWS for lane in lanes]
        room = max(calls * cost for calls, cost in zip(wanted, costs, strict=True))
        rooms = [room] * min(self.sides, len(lanes))
        parts = []
        for lane, calls, cost in zip(lanes, wanted, costs, strict=True):
            side = rooms.index(max(rooms))
            calls = min(calls, rooms[side] // cost)
            if calls:
                rooms[side] -= calls * cost
                due = lane.due + calls / (lane.calls_a_token / longest) ** _PARALLEL_SHARE
                lane.due = min(due, latest)
                parts.append(lane.part(calls, side))
        return tuple(parts)

    def _activate(self, lanes: list[GenerateLane[WorkT]]) -> None:
        """Lanes that became busy are due now, like the others."""
        if lanes == self._active:
            return
        here = [lane for lane in lanes if lane in self._active]
        now = min((lane.due for lane in here), default=self._calls)
        for lane in lanes:
            if lane not in here:
                lane.due = min(now, self._calls)
        self._active = list(lanes)

    def _fitting(
        self, lanes: list[GenerateLane[WorkT]], most_rows: int
    ) -> list[GenerateLane[WorkT]]:
        """Lanes that fit into one call, most overdue first; at least one."""
        lanes.sort(key=lambda lane: lane.due)
        self._calls = max(self._calls, lanes[0].due)
        chosen: list[GenerateLane[WorkT]] = []
        rows = 0
        for lane in lanes:
            more = len(lane.rows) + len(lane.joining)
            if not chosen or (rows + more <= most_rows and len(chosen) < self.most_lanes):
                chosen.append(lane)
                rows += more
        return chosen


def _latest(first: GenerateLane[WorkT], longest: int) -> float:
    """The latest a lane is due when `first` is due first.

    Calls it got because there was room do not count against it: no lane gets further ahead than a
    token of the longest rung.
    """
    return first.due + longest


def _share(calls: int, longest: int) -> float:
    """The share of shared calls in which rows of this many calls a token take part.

    Rounded up to whole tokens, so that rungs meet at the same steps again.
    """
    tokens = min(math.ceil(math.sqrt(longest / calls)), longest // calls)
    return tokens * calls / longest


class SearchLane(Generic[WorkT]):
    """One rung's beam searches. Each is a batch of its own; a call is one step of one search."""

    def __init__(self, key: LaneKey, cache_bytes: Callable[[int, int], int]) -> None:
        self.key = key
        self.waiting: deque[Job[WorkT]] = deque()
        self.running: deque[Job[WorkT]] = deque()
        self._over: list[Job[WorkT]] = []
        self._cache_bytes = cache_bytes  # for (rows, positions)

    def occupants(self) -> list[Job[WorkT]]:
        """Jobs that hold or were promised memory."""
        return [*self.running, *self._over]

    def charged_bytes(self, extra: Job[WorkT] | None = None) -> int:
        """The memory that this lane holds or may come to hold, optionally with one more job."""
        jobs = self.occupants() if extra is None else [*self.occupants(), extra]
        return sum(self._cache_bytes(1, job.positions) for job in jobs)

    def add(self, job: Job[WorkT]) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)

    def enter(self, job: Job[WorkT]) -> None:
        """The job runs from now on, after the running ones."""
        self.running.append(job)

    def drop(self, job: Job[WorkT]) -> None:
        """The job has ended."""
        if job.state is State.QUEUED:
            self.waiting.remove(job)
        else:
            self.running.remove(job)
            self._over.append(job)

    def forget(self) -> tuple[Job[WorkT], ...]:
        """Jobs whose memory is to be freed now."""
        over, self._over = tuple(self._over), []
        return over

    def turn(self) -> Job[WorkT] | None:
        """The search that runs its next step; they alternate."""
        if not self.running:
            return None
        self.running.rotate(-1)
        return self.running[-1]


CachedLane = GenerateLane[WorkT] | SearchLane[WorkT]


class CacheMemory(Generic[WorkT]):
    """Decides which waiting job may take KV cache memory next: by age, within the limit."""

    def __init__(
        self,
        limits: Limits,
        generate: Mapping[LaneKey, GenerateLane[WorkT]],
        search: Mapping[LaneKey, SearchLane[WorkT]],
    ) -> None:
        self._limits = limits
        self._generate, self._search = generate, search

    def __iter__(self) -> Iterator[CachedLane[WorkT]]:
        yield from self._generate.values()
        yield from self._search.values()

    @property
    def charged_bytes(self) -> int:
        """Memory that running jobs hold or were promised."""
        return sum(lane.charged_bytes() for lane in self)

    def may_enter(self, lane: CachedLane[WorkT]) -> bool:
        """Whether there is a slot and memory for the next job of this lane.

        A job does not take memory that an older job of another lane waits for.
        """
        number = lane.waiting[0].number
        free_bytes = self._limits.cache_bytes - self.charged_bytes - _growth_bytes(lane)
        return (
            self._has_room(lane)
            and free_bytes >= 0
            and not any(
                other.waiting
                and other.waiting[0].number < number
                and self._has_room(other)
                and _growth_bytes(other) > free_bytes
                for other in self
            )
        )

    def _has_room(self, lane: CachedLane[WorkT]) -> bool:
        return len(lane.occupants()) < self._limits.decode_rows


def _growth_bytes(lane: CachedLane[WorkT]) -> int:
    """The memory that the next job of this lane would add."""
    return lane.charged_bytes(lane.waiting[0]) - lane.charged_bytes()
