"""Lanes of generations and searches: prompts to read, rows to decode, and the cache memory they
take.

Rows join and leave between two tokens only.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic

from serve.engine.cost import CostKey
from serve.engine.job import DecodeCall, DecodePart, Job, LaneKey, Limits, Sharing, State, WorkT


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
        self.decode_cost_key = CostKey(key.model, "decode", key.steps)
        self.prefill_cost_key = CostKey(key.model, "prefill", key.steps)
        self.calls_a_token = calls_a_token
        self.waiting: deque[Job[WorkT]] = deque()
        self.waiting_prompt_tokens = self.waiting_tokens = 0  # of those, to read and to write
        self.returning: deque[Job[WorkT]] = deque()  # to be read in again
        self.prefilling: Job[WorkT] | None = None
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
    def may_prefill(self) -> bool:
        """Whether the next prompt may be begun: one at a time, so that memory is for one."""
        return self.prefilling is None and not self.joining

    def occupants(self) -> list[Job[WorkT]]:
        """Whoever holds, or is promised, cache memory. A row that left and returns counts once."""
        one = [] if self.prefilling is None else [self.prefilling]
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
        if job is self.prefilling:
            self.prefilling = None
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
        assert self.may_prefill
        most = self._most_rows if self.occupants() else 0
        self.prefilling = job
        self._most_rows = max(most, len(self.occupants()))

    def prefilled(self, full: bool) -> None:
        """The prompt has been read: it becomes a row before the next token, unless it is full."""
        job, self.prefilling = self.prefilling, None
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


# The generations of one model: whose prompt is read, and which rungs decode in the next call.
# Rungs of one model may share calls of its one-step graph, or go abreast, each on a thread of its
# own until all meet again. A row of M steps needs M calls for a token, so turns of equal number
# would make the many steps slow, and a token for every row in turn would make the few steps wait
# for the many. Between the two, a rung of M steps has a token ready about sqrt(L / M) times as
# often as the longest rung there is, of L steps; where a call has room left, the others come
# along as well. Those that go abreast have no such room, and there it is the cube root.


_MEETINGS = 2  # of those that go abreast while the longest rung makes a token
_BESIDE_ROWS = 1  # what a call costs beside its rows, in rows
_PARALLEL_SHARE = 2 / 3  # calls of M steps are made in proportion to M to the power of this


class DecodeLanes(Generic[WorkT]):
    """The lanes of one model. Each is due again after as many calls as its share allows."""

    def __init__(self, most_lanes: int, sides: int) -> None:
        self.most_lanes = most_lanes  # that may share a call
        self.sides = sides  # that may go abreast
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
        """The lanes in the order in which they may read; the last one asked goes to the end."""
        for _ in range(len(self._readers)):
            self._readers.rotate(-1)
            yield self._readers[-1]

    def share(self, sharing: Sharing) -> None:
        """How the cores are shared from now on; what a lane was ahead in another way is over."""
        if sharing != self.sharing:
            self.sharing = sharing
            self._calls = min((lane.due for lane in self._lanes.values()), default=self._calls)
            for lane in self._lanes.values():
                lane.due = self._calls

    def decode(self, most_rows: int) -> DecodeCall[WorkT] | None:
        """The next call for the rows there are."""
        lanes = [lane for lane in self._lanes.values() if not lane.idle]
        self._activate(lanes)
        if not lanes:
            return None
        dead = [lane for lane in lanes if lane.dead]
        if dead:
            return DecodeCall(tuple(lane.lose() for lane in dead))
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
        """A whole token of the lane that has waited longest, once none is under way any more."""
        first = min(lanes, key=lambda lane: (lane.calls == 0, lane.due))
        if first.calls:
            return first.part()
        first.due += 1
        return first.token()

    def _parallel(self, lanes: list[GenerateLane[WorkT]]) -> tuple[DecodePart[WorkT], ...]:
        """As many calls of each as fill all sides alike, longest due first."""
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
        """Whoever has come since is due now, as much as those that are here."""
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
        """Those that fit into a call, longest due first; one at least."""
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
    """When a lane is due at the latest, where this one is due first.

    What there was room for beyond its share is not held against it: no lane is ever further ahead
    than a token of the longest.
    """
    return first.due + longest


def _share(calls: int, longest: int) -> float:
    """The share of shared calls that rows of so many calls a token are due in.

    Rounded up to whole tokens, so that rungs meet at the same steps again.
    """
    tokens = min(math.ceil(math.sqrt(longest / calls)), longest // calls)
    return tokens * calls / longest


# A lane of beam searches: each is a batch of its own, and one step of one of them is a call.


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


# Who may take cache memory next: it goes by age, and never beyond its limit.


CachedLane = GenerateLane[WorkT] | SearchLane[WorkT]


class CacheMemory(Generic[WorkT]):
    """The lanes whose jobs hold memory while they run."""

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
        """What jobs that run hold, or were promised."""
        return sum(lane.charged_bytes() for lane in self)

    def may_enter(self, lane: CachedLane[WorkT]) -> bool:
        """Whether there is room and memory for the next one of this lane.

        Nobody enters who would take it from an older one that waits for it.
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
    """The memory that the next one of this lane would add."""
    return lane.charged_bytes(lane.waiting[0]) - lane.charged_bytes()
