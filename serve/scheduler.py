"""What runs next: classifications, prompts to read, tokens to decode, steps of searches, in turn.

Plain Python that is told the time and asked for the next call; it deliberately knows no threads,
clocks, tensors or HTTP, and nothing of what a call computes. Every lane has a turn for each kind
of call, and turns go round: reading prompts never starves decoding, nor one model another.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal

from serve.job import (
    Call,
    ClassifyCall,
    DecodeCall,
    Job,
    LaneKey,
    PrefillCall,
    SearchCall,
    State,
    WorkT,
)
from serve.lane import ClassifyLane, GenerateLane
from serve.search_lane import SearchLane

# The memory that a lane's batch may hold for so many rows of so many positions.
CacheBytes = Callable[[LaneKey, int, int], int]
Turn = tuple[LaneKey, Literal["classify", "prefill", "decode", "search"]]
CachedLane = GenerateLane[WorkT] | SearchLane[WorkT]


@dataclass(frozen=True, slots=True)
class Limits:
    """What no queue, batch or cache may exceed."""

    queue_requests: int = 256
    batch_rows: int = 16
    batch_tokens: int = 8192  # rows times the longest, in one classification call
    decode_rows: int = 16
    cache_bytes: int = 128 * 2**20
    max_wait_s: float = 0.0  # how long a classification may wait for company

    def __post_init__(self) -> None:
        for name in ("queue_requests", "batch_rows", "batch_tokens", "decode_rows", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_wait_s < 0:
            raise ValueError("max_wait_s must not be negative")


class Scheduler(Generic[WorkT]):
    """Jobs go in with `add`, calls come out of `next`, and every job leaves through `end`."""

    def __init__(self, limits: Limits, cache_bytes: CacheBytes) -> None:
        self.limits = limits
        self.queued = 0
        self._cache_bytes = cache_bytes
        self._live: dict[int, Job[WorkT]] = {}  # by number, so oldest first
        self._classify: dict[LaneKey, ClassifyLane[WorkT]] = {}
        self._generate: dict[LaneKey, GenerateLane[WorkT]] = {}
        self._search: dict[LaneKey, SearchLane[WorkT]] = {}
        self._turns: deque[Turn] = deque()
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Jobs of which some part has run."""
        return len(self._live) - self.queued

    @property
    def full(self) -> bool:
        """Whether the queue has no place for one more request."""
        return self.queued >= self.limits.queue_requests

    @property
    def charged_bytes(self) -> int:
        """Cache memory held by, or promised to, generations and searches that run."""
        return sum(lane.charged_bytes() for lane in self._cached_lanes())

    def fits(self, lane: LaneKey, positions: int) -> bool:
        """Whether a generation of so many positions could run on an idle server."""
        return self._cache_bytes(lane, 1, positions) <= self.limits.cache_bytes

    def add(self, job: Job[WorkT], now_s: float) -> None:
        """Queue a job. The caller has checked `full`, and `fits` for a generation."""
        assert not self.full, "the queue is full"
        assert job.state is State.QUEUED and job.lengths
        job.number = self._arrivals
        job.queued_s = now_s
        self._arrivals += 1
        self._live[job.number] = job
        self.queued += 1
        if job.lane.kind == "classify":
            self._classify_lane(job.lane).add(job)
            return
        assert self.fits(job.lane, job.positions), "a generation that can never run"
        writes = job.lane.kind == "generate"
        lane = self._generate_lane(job.lane) if writes else self._search_lane(job.lane)
        lane.waiting.append(job)

    def end(self, job: Job[WorkT]) -> bool:
        """The job is over, whatever the reason; False if it already was."""
        if job.state is State.ENDED:
            return False
        del self._live[job.number]
        if job.state is State.QUEUED:
            self.queued -= 1
        if job.lane.kind == "classify":
            self._classify[job.lane].drop(job)
        elif job.lane.kind == "generate":
            self._generate[job.lane].drop(job)
        else:
            self._search[job.lane].drop(job)
        job.state = State.ENDED
        return True

    def row_done(self, job: Job[WorkT]) -> bool:
        """One row of a classification has its answer; True if that ended the job."""
        if job.state is State.ENDED:
            return False
        job.rows_left -= 1
        return job.rows_left == 0 and self.end(job)

    def read_again(self, job: Job[WorkT]) -> None:
        """The row's cache is full: it leaves the batch and comes back as a prompt, ahead of new."""
        self._generate[job.lane].returning.append(job)

    def evict(self, key: LaneKey) -> tuple[int, ...]:
        """Rows to remove now from the lane's batch, in order; frees their memory at once."""
        return self._generate[key].evict()

    def forget(self, key: LaneKey) -> tuple[Job[WorkT], ...]:
        """Searches of the lane that are over, whose memory is to be freed now."""
        return self._search[key].forget()

    def withdraw(self, job: Job[WorkT]) -> None:
        """The prompt could not be read: its row, the last, never came to be. The job must end."""
        last = self._generate[job.lane].rows.pop()
        assert last is job

    def abandon(self, key: LaneKey) -> None:
        """The lane's batch is lost: none of its rows exists any more. Its jobs must have ended."""
        lane = self._generate[key]
        assert all(job.state is State.ENDED for job in lane.rows)
        lane.rows.clear()
        lane.held_bytes = 0

    def hold(self, key: LaneKey, held_bytes: int) -> None:
        """How much cache memory the lane's batch holds now: buffers outlive the rows in them."""
        self._generate[key].held_bytes = held_bytes

    def busy_turns(self) -> list[Turn]:
        """The turns that have something to do, or will once there is room."""
        busy: list[Turn] = [
            (key, "classify") for key, lane in self._classify.items() if lane.waiting
        ]
        for key, lane in self._generate.items():
            if lane.rows:
                busy.append((key, "decode"))
            if lane.returning or lane.waiting:
                busy.append((key, "prefill"))
        busy += [(key, "search") for key, one in self._search.items() if one.running or one.waiting]
        return busy

    def calls_ahead(self, key: LaneKey) -> int:
        """How many classification calls a new row of this lane would wait for, in its lane."""
        lane = self._classify.get(key)
        return len(lane.waiting) // self.limits.batch_rows if lane else 0

    def rows(self, key: LaneKey) -> tuple[Job[WorkT], ...]:
        """The jobs in the lane's decode batch, in the order of its rows."""
        return tuple(self._generate[key].rows)

    def jobs(self) -> list[Job[WorkT]]:
        """Every job that has not ended, oldest first."""
        return list(self._live.values())

    def next(self, now_s: float) -> Call[WorkT] | None:
        """The next call, or None if nothing can run now."""
        for _ in range(len(self._turns)):
            turn = self._turns[0]
            self._turns.rotate(-1)
            call = self._take(turn, now_s)
            if call is not None:
                return call
        return None

    def wake_s(self) -> float | None:
        """When to ask again though nothing happens: a batch will have waited long enough."""
        waiting = [lane.waiting[0][0].queued_s for lane in self._classify.values() if lane.waiting]
        return min(waiting) + self.limits.max_wait_s if waiting else None

    def _take(self, turn: Turn, now_s: float) -> Call[WorkT] | None:
        key, kind = turn
        if kind == "classify":
            return self._take_classify(key, now_s)
        if kind == "search":
            return self._take_search(key, now_s)
        lane = self._generate[key]
        if kind == "prefill":
            return self._take_prefill(key, lane, now_s)
        evict = lane.evict()
        return DecodeCall(key, evict, tuple(lane.rows)) if lane.rows or evict else None

    def _take_classify(self, key: LaneKey, now_s: float) -> Call[WorkT] | None:
        lane = self._classify[key]
        if not lane.waiting:
            return None
        waited_s = now_s - lane.waiting[0][0].queued_s
        if len(lane.waiting) < self.limits.batch_rows and waited_s < self.limits.max_wait_s:
            return None
        rows = lane.take(self.limits.batch_rows, self.limits.batch_tokens)
        for job, _ in rows:
            self._start(job, now_s)
        return ClassifyCall(key, rows)

    def _take_prefill(
        self, key: LaneKey, lane: GenerateLane[WorkT], now_s: float
    ) -> Call[WorkT] | None:
        if lane.returning:
            evict = lane.evict()
            job = lane.returning.popleft()
        elif lane.waiting and self._may_enter(lane):
            evict = lane.evict()
            job = lane.waiting.popleft()
            self._start(job, now_s)
        else:
            return None
        lane.enter(job)
        return PrefillCall(key, evict, job)

    def _take_search(self, key: LaneKey, now_s: float) -> SearchCall[WorkT] | None:
        lane = self._search[key]
        over = lane.forget()
        if lane.waiting and self._may_enter(lane):
            job = lane.waiting.popleft()
            self._start(job, now_s)
            lane.enter(job)
        next_job = lane.turn()
        return SearchCall(key, over, next_job) if over or next_job is not None else None

    def _may_enter(self, lane: CachedLane[WorkT]) -> bool:
        """Whether there is room and memory for the next one of this lane.

        Memory goes by age: nobody enters who would take it from an older one that waits for it.
        """
        number = lane.waiting[0].number
        free_bytes = self.limits.cache_bytes - self.charged_bytes - self._growth_bytes(lane)
        return (
            self._has_room(lane)
            and free_bytes >= 0
            and not any(
                other.waiting
                and other.waiting[0].number < number
                and self._has_room(other)
                and self._growth_bytes(other) > free_bytes
                for other in self._cached_lanes()
            )
        )

    def _cached_lanes(self) -> list[CachedLane[WorkT]]:
        """The lanes whose jobs hold memory while they run."""
        return [*self._generate.values(), *self._search.values()]

    def _has_room(self, lane: CachedLane[WorkT]) -> bool:
        return len(lane.occupants()) < self.limits.decode_rows

    def _growth_bytes(self, lane: CachedLane[WorkT]) -> int:
        """The memory that the next one of this lane would add."""
        return lane.charged_bytes(lane.waiting[0]) - lane.charged_bytes()

    def _start(self, job: Job[WorkT], now_s: float) -> None:
        if job.state is State.QUEUED:
            job.state = State.RUNNING
            job.started_s = now_s
            self.queued -= 1

    def _classify_lane(self, key: LaneKey) -> ClassifyLane[WorkT]:
        if key not in self._classify:
            self._classify[key] = ClassifyLane()
            self._turns.append((key, "classify"))
        return self._classify[key]

    def _generate_lane(self, key: LaneKey) -> GenerateLane[WorkT]:
        if key not in self._generate:
            self._generate[key] = GenerateLane(partial(self._cache_bytes, key))
            self._turns.extend([(key, "prefill"), (key, "decode")])
        return self._generate[key]

    def _search_lane(self, key: LaneKey) -> SearchLane[WorkT]:
        if key not in self._search:
            self._search[key] = SearchLane(partial(self._cache_bytes, key))
            self._turns.append((key, "search"))
        return self._search[key]
