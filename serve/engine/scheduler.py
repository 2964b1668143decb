"""What runs next: classify batches, prefill, decode steps and search steps, in turn.

Plain Python that is told the time and asked for the next call. Every lane has a turn for each kind
of call, and turns rotate: prefill never starves decoding, nor one model another.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic

from serve.engine.backlog import Backlog, CallSeconds
from serve.engine.classify import ClassifyLanes
from serve.engine.cost import LatencyModel
from serve.engine.generate import CacheMemory, DecodeLanes, GenerateLane, SearchLane
from serve.engine.job import (
    Call,
    ClassifyCall,
    Deadlines,
    Job,
    LaneKey,
    Limits,
    PrefillCall,
    SearchCall,
    Sharing,
    State,
    Turn,
    WorkT,
)

# Cache memory of a lane's batch, for (rows, positions).
CacheBytes = Callable[[LaneKey, int, int], int]
# How many lanes of the same model may share a call, or run in parallel.
LanesOf = Callable[[LaneKey], int]


class Scheduler(Generic[WorkT]):
    """Jobs go in with `add`, calls come out of `next`, and every job leaves through `end` once."""

    def __init__(
        self,
        limits: Limits,
        cache_bytes: CacheBytes,
        most_lanes: LanesOf = lambda key: 1,
        latency: LatencyModel | None = None,
        usual_s: CallSeconds = lambda turn: None,
        sides: LanesOf = lambda key: 1,
    ) -> None:
        self.limits = limits
        self.queued = 0
        self._cache_bytes = cache_bytes
        self._most_lanes = most_lanes
        self._sides = sides
        self._live: dict[int, Job[WorkT]] = {}  # by number, so oldest first
        latency = latency or LatencyModel()
        self._classify_lanes: ClassifyLanes[WorkT] = ClassifyLanes(limits, latency)
        self._deadlines: Deadlines[WorkT] = Deadlines()
        self._generate: dict[LaneKey, GenerateLane[WorkT]] = {}
        self._decode_lanes: dict[str, DecodeLanes[WorkT]] = {}  # by model
        self._search: dict[LaneKey, SearchLane[WorkT]] = {}
        self._memory = CacheMemory(limits, self._generate, self._search)
        self._turns: deque[Turn] = deque()
        self._arrivals = 0
        self.backlog: Backlog[WorkT] = Backlog(
            limits,
            latency,
            usual_s,
            self._classify_lanes,
            self._search,
            self._decode_lanes,
            self.busy_turns,
        )

    @property
    def running(self) -> int:
        """Jobs of which some part has run."""
        return len(self._live) - self.queued

    @property
    def full(self) -> bool:
        """Whether the queue is full."""
        return self.queued >= self.limits.queue_requests

    @property
    def charged_bytes(self) -> int:
        """KV cache memory held by, or promised to, running generations and searches."""
        return self._memory.charged_bytes

    def fits(self, lane: LaneKey, positions: int) -> bool:
        """Whether a generation of this many positions could run on an idle server."""
        return self._cache_bytes(lane, 1, positions) <= self.limits.cache_bytes

    def add(self, job: Job[WorkT], now_s: float) -> None:
        """Queue a job. The caller has checked `full`, and `fits` for a generation."""
        assert not self.full, "the queue is full"
        assert job.state is State.QUEUED and job.lengths
        job.number = self._arrivals
        job.queued_s = now_s
        self._arrivals += 1
        self._live[job.number] = job
        self._deadlines.add(job)
        self.queued += 1
        if job.lane.kind == "classify":
            self.open(job.lane)
            self._classify_lanes.add(job)
            return
        assert self.fits(job.lane, job.positions), "a generation that can never run"
        opened = self._generate_lane if job.lane.kind == "generate" else self._search_lane
        opened(job.lane).add(job)

    def end(self, job: Job[WorkT]) -> bool:
        """The job is over, for whatever reason; False if it was before."""
        if job.state is State.ENDED:
            return False
        del self._live[job.number]
        if job.state is State.QUEUED:
            self.queued -= 1
        if job.lane.kind == "classify":
            self._classify_lanes.drop(job)
        elif job.lane.kind == "generate":
            self._generate[job.lane].drop(job)
        else:
            self._search[job.lane].drop(job)
        job.state = State.ENDED
        return True

    def row_done(self, job: Job[WorkT]) -> bool:
        """A row of a classification has its answer; True if that ended the job."""
        if job.state is State.ENDED:
            return False
        job.rows_left -= 1
        return job.rows_left == 0 and self.end(job)

    def prefill_again(self, job: Job[WorkT]) -> None:
        """The cache is full: the row leaves the batch and is prefilled again, before new jobs."""
        self._generate[job.lane].requeued.append(job)

    def evict(self, key: LaneKey) -> tuple[int, ...]:
        """Rows to remove from the lane's batch now, in this order; their memory is free at once."""
        return self._generate[key].evict()

    def forget(self, key: LaneKey) -> tuple[Job[WorkT], ...]:
        """Searches of the lane that are over and whose memory is to be freed now."""
        return self._search[key].forget()

    def prefilled(self, job: Job[WorkT], full: bool) -> None:
        """The job's prefill is done; if its cache is full, it is prefilled again, shorter."""
        self._generate[job.lane].prefilled(full)

    def share(self, model: str, sharing: Sharing) -> None:
        """Change how the rungs of a model decode."""
        self._decode_lanes[model].share(sharing)

    def prefills_over(self, key: LaneKey) -> tuple[int, ...]:
        """Numbers of the lane's jobs whose prefill is to be freed now."""
        return self._generate[key].forget()

    def drop_batch(self, key: LaneKey) -> None:
        """The lane's batch is lost. All its jobs must have ended."""
        self._generate[key].drop_batch()

    def set_held_bytes(self, key: LaneKey, held_bytes: int) -> None:
        """Note the cache memory of the lane's batch, whose buffers outlive the rows in them."""
        self._generate[key].held_bytes = held_bytes

    def busy_turns(self, but: str = "") -> list[Turn]:
        """Turns with work, now or once there is room, of all models but one."""
        busy: list[Turn] = [(key, "classify") for key in self._classify_lanes.busy()]
        lanes = [lane for model, own in self._decode_lanes.items() if model != but for lane in own]
        for lane in lanes:
            if lane.rows:
                busy.append((lane.key, "decode"))
            if lane.prefilling or lane.requeued or lane.waiting:
                busy.append((lane.key, "prefill"))
        busy += [(key, "search") for key, one in self._search.items() if one.running or one.waiting]
        return [turn for turn in busy if turn[0].model != but]

    def rows(self, key: LaneKey) -> tuple[Job[WorkT], ...]:
        """The jobs in the lane's batch, in the order of its rows."""
        return tuple(self._generate[key].rows)

    def close(self, model: str) -> bool:
        """Remove the lanes of a model; False while any of its work is left."""
        lanes: dict[LaneKey, GenerateLane[WorkT] | SearchLane[WorkT]] = {}
        lanes |= {**self._generate, **self._search}
        own = [key for key in lanes if key.model == model]
        if any(job.lane.model == model for job in self._live.values()):
            return False
        if any(lanes[key].occupants() for key in own):
            return False
        for key in own:
            self._generate.pop(key, None)
            self._search.pop(key, None)
        self._decode_lanes.pop(model, None)
        self._classify_lanes.close(model)
        self._turns = deque(turn for turn in self._turns if turn[0].model != model)
        return True

    def jobs(self) -> list[Job[WorkT]]:
        """All jobs that have not ended, oldest first."""
        return list(self._live.values())

    def lapsed(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs that are too late, or cannot be in time; the caller ends them."""
        late = self._deadlines.passed(now_s)
        return late + [job for job in self._classify_lanes.too_late(now_s) if job not in late]

    def next(self, now_s: float) -> Call[WorkT] | None:
        """The next call; None if nothing can run now."""
        for _ in range(len(self._turns)):
            turn = self._turns[0]
            self._turns.rotate(-1)
            call = self._take(turn, now_s)
            if call is not None:
                seconds = call.seconds if isinstance(call, ClassifyCall) else None
                self.backlog.begin(turn, now_s, seconds)
                return call
        self.backlog.rest()
        return None

    def wake_s(self) -> float | None:
        """When to ask again even if nothing happens: a batch will have waited long enough."""
        times = self._deadlines.next_s, self._classify_lanes.wake_s()
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _take(self, turn: Turn, now_s: float) -> Call[WorkT] | None:
        key, kind = turn
        if kind == "classify":
            return self._take_classify(key, now_s)
        if kind == "search":
            return self._take_search(key, now_s)
        decode_lanes = self._decode_lanes[key.model]
        if kind == "prefill":
            return self._take_prefill(decode_lanes, now_s)
        return decode_lanes.decode(self.limits.decode_rows)

    def _take_classify(self, key: LaneKey, now_s: float) -> Call[WorkT] | None:
        call = self._classify_lanes.take(key, now_s, self.backlog.beside_s(key))
        for job, _ in call.rows if call else ():
            self._start(job, now_s)
        return call

    def _take_prefill(self, decode_lanes: DecodeLanes[WorkT], now_s: float) -> Call[WorkT] | None:
        for lane in decode_lanes.readers():
            over = lane.forget()
            if lane.may_prefill and lane.requeued:
                lane.read(lane.requeued.popleft())
            elif lane.may_prefill and lane.waiting and self._memory.may_enter(lane):
                job = lane.take()
                self._start(job, now_s)
                lane.read(job)
            if over or lane.prefilling is not None:
                return PrefillCall(lane.key, over, lane.prefilling)
        return None

    def _take_search(self, key: LaneKey, now_s: float) -> SearchCall[WorkT] | None:
        lane = self._search[key]
        over = lane.forget()
        if lane.waiting and self._memory.may_enter(lane):
            job = lane.waiting.popleft()
            self._start(job, now_s)
            lane.enter(job)
        next_job = lane.turn()
        return SearchCall(key, over, next_job) if over or next_job is not None else None

    def _start(self, job: Job[WorkT], now_s: float) -> None:
        if job.state is State.QUEUED:
            job.state = State.RUNNING
            job.started_s = now_s
            self.queued -= 1

    def open(self, key: LaneKey) -> None:
        """Open a classification lane."""
        if self._classify_lanes.open(key):
            self._turns.append((key, "classify"))

    def _generate_lane(self, key: LaneKey) -> GenerateLane[WorkT]:
        if key not in self._generate:
            most = self._most_lanes(key)
            calls = key.steps if most > 1 else 1
            lane: GenerateLane[WorkT] = GenerateLane(
                key, calls, self.limits.decode_rows, partial(self._cache_bytes, key)
            )
            if key.model not in self._decode_lanes:
                self._decode_lanes[key.model] = DecodeLanes(most, self._sides(key))
                self._turns.extend([(key, "prefill"), (key, "decode")])
            self._decode_lanes[key.model].open(lane)
            self._generate[key] = lane
        return self._generate[key]

    def _search_lane(self, key: LaneKey) -> SearchLane[WorkT]:
        if key not in self._search:
            self._search[key] = SearchLane(key, partial(self._cache_bytes, key))
            self._turns.append((key, "search"))
        return self._search[key]
