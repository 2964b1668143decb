"""Random arrivals, departures, full windows and failures, against a runtime that only counts.

Every request ends exactly once, none starves, no limit is ever exceeded, and nothing is left over.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.engine.job import (
    ClassifyCall,
    DecodeCall,
    DecodePart,
    Job,
    LaneKey,
    Limits,
    PrefillCall,
    SearchCall,
    State,
)
from serve.engine.scheduler import Scheduler

WINDOW = 12
LIMITS = Limits(
    queue_requests=6, batch_rows=3, batch_tokens=24, decode_rows=2, cache_bytes=100, max_wait_s=0
)
LANES = [
    LaneKey(model, kind, steps)
    for model in ("a", "b")
    for kind in ("classify", "generate", "search")
    for steps in (1, 4)
]
MOST_LANES = {"a": 2, "b": 1}  # that share a call
# Turns there can be: two for each generation lane, one for each other.
TURNS = sum(2 if lane.kind == "generate" else 1 for lane in LANES)


@dataclass(eq=False)
class Request:
    """What a client waits for."""

    tokens_left: int
    cached: int = 0
    answered: int = 0
    waited_calls: int = 0
    ended: list[str] = field(default_factory=list)


def cache_bytes(lane: LaneKey, rows: int, positions: int) -> int:
    return rows * positions * lane.steps


class Traffic(RuleBasedStateMachine):
    """Drives a scheduler as the engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[Request] = Scheduler(
            LIMITS, cache_bytes, lambda lane: MOST_LANES[lane.model]
        )
        self.jobs: list[Job[Request]] = []
        self.batches: dict[LaneKey, list[Job[Request]]] = {}
        self.prefills: dict[Job[Request], int] = {}  # pieces left
        self.calls: dict[LaneKey, int] = {}  # that the present token has had
        self.searches: set[Job[Request]] = set()  # whose memory is held
        self.now_s = 0.0

    @rule(
        lane=st.sampled_from(LANES),
        lengths=st.lists(st.integers(1, WINDOW), min_size=1, max_size=5),
        max_tokens=st.integers(1, 20),
    )
    def arrive(self, lane: LaneKey, lengths: list[int], max_tokens: int) -> None:
        if self.scheduler.full:
            return
        self.now_s += 1.0
        if lane.kind == "classify":
            job = Job(lane, Request(0), tuple(lengths))
        else:
            positions = min(lengths[0] + max_tokens, WINDOW)
            job = Job(lane, Request(max_tokens), (lengths[0],), positions)
        assert self.scheduler.fits(lane, job.positions)
        self.scheduler.add(job, self.now_s)
        self.jobs.append(job)

    @rule(data=st.data())
    @precondition(lambda self: self.living)
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.living))
        assert self.scheduler.end(job)
        job.work.ended.append("left")

    @rule(failure=st.sampled_from([None, None, None, "row", "call"]))
    def tick(self, failure: str | None) -> None:
        running = [job for job in self.living if job.state is State.RUNNING]
        call = self.scheduler.next(self.now_s)
        if call is None:
            assert not self.living, "work is left, and nothing of it may run"
            return
        for job in running:
            job.work.waited_calls += 1
        if isinstance(call, ClassifyCall):
            self.classify(call, failure)
            return
        if isinstance(call, SearchCall):
            self.search(call, failure)
            return
        if isinstance(call, PrefillCall):
            self.read(call, failure)
        else:
            self.decode(call, failure)

    def classify(self, call: ClassifyCall[Request], failure: str | None) -> None:
        lengths = [job.lengths[row] for job, row in call.rows]
        assert 1 <= len(lengths) <= LIMITS.batch_rows
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= LIMITS.batch_tokens
        assert len(set(call.rows)) == len(call.rows)
        for job, _ in call.rows:
            assert job.lane == call.lane and job.state is State.RUNNING
        for job, _ in call.rows:
            job.work.waited_calls = 0
            if failure:
                self.fail(job)
            job.work.answered += 1
            if self.scheduler.row_done(job):
                assert job.work.answered == len(job.lengths)
                job.work.ended.append("done")

    def search(self, call: SearchCall[Request], failure: str | None) -> None:
        self.searches -= set(call.over)
        if call.job is not None:
            assert call.job.state is State.RUNNING and call.job.lane == call.lane
            self.searches.add(call.job)
            self.take_tokens((call.job,), failure and "row")
        self.searches -= set(self.scheduler.forget(call.lane))

    def read(self, call: PrefillCall[Request], failure: str | None) -> None:
        self.forget(call.over)
        if call.job is None:
            return
        job = call.job
        assert job.lane == call.lane and job.state is State.RUNNING
        left = self.prefills[job] = self.prefills.get(job, 2) - 1
        if failure == "call":
            self.fail(job)
        elif left:
            job.work.waited_calls = 0
        else:
            job.work.cached = job.lengths[0] if job.work.answered == 0 else WINDOW // 2
            self.scheduler.prefilled(job, full=job.work.cached == WINDOW)
            self.take_tokens((job,), failure)
        self.forget(self.scheduler.prefills_over(call.lane))

    def decode(self, call: DecodeCall[Request], failure: str | None) -> None:
        assert len({part.lane for part in call.parts}) == len(call.parts)
        assert len({part.lane.model for part in call.parts}) == 1
        assert len(call.parts) <= MOST_LANES[call.parts[0].lane.model]
        if len(call.parts) > 1:
            assert sum(len(part.jobs) for part in call.parts) <= LIMITS.decode_rows
        for part in call.parts:
            rows = self.batches.setdefault(part.lane, [])
            if part.lost:
                rows.clear()
                self.calls[part.lane] = 0
            if part.evict or part.join:
                assert part.begins, "rows moved in the middle of a token"
            self.remove(rows, part.evict)
            for job in part.join:
                assert self.prefills.pop(job) == 0
                rows.append(job)
            assert list(part.jobs) == rows, "the scheduler and the batch disagree on the rows"
            assert len(rows) <= LIMITS.decode_rows
            if rows and failure == "call":
                for job in rows:
                    self.fail(job)
                rows.clear()
                self.calls[part.lane] = 0
                self.scheduler.drop_batch(part.lane)
            elif rows:
                self.advance(part, failure)
            longest = max((job.work.cached for job in rows), default=0)
            self.scheduler.set_held_bytes(part.lane, len(rows) * longest * part.lane.steps)

    def advance(self, part: DecodePart[Request], failure: str | None) -> None:
        calls = self.calls.get(part.lane, 0)
        assert part.begins == (calls == 0)
        mixes = MOST_LANES[part.lane.model] > 1
        last = part.lane.steps if mixes and not part.whole else 1
        assert part.ends == (calls + 1 == last)
        self.calls[part.lane] = 0 if part.ends else calls + 1
        for job in part.jobs:
            job.work.waited_calls = 0
        if not part.ends:
            return
        for job in part.jobs:
            assert job.work.cached < WINDOW, "a full row was decoded"
            job.work.cached += 1
        self.take_tokens(part.jobs, failure)
        for job in part.jobs:
            if job.work.cached == WINDOW and job.state is State.RUNNING:
                self.scheduler.prefill_again(job)
        self.remove(self.batches[part.lane], self.scheduler.evict(part.lane))

    def forget(self, numbers: tuple[int, ...]) -> None:
        for job in [job for job in self.prefills if job.number in numbers]:
            del self.prefills[job]

    def take_tokens(self, jobs: tuple[Job[Request], ...], failure: str | None) -> None:
        for index, job in enumerate(jobs):
            work = job.work
            work.waited_calls = 0
            if job.state is State.ENDED:
                continue
            if failure == "row" and index == 0:
                self.fail(job)
                continue
            work.answered += 1
            work.tokens_left -= 1
            if work.tokens_left == 0:
                assert self.scheduler.end(job)
                work.ended.append("done")

    def fail(self, job: Job[Request]) -> None:
        if self.scheduler.end(job):
            job.work.ended.append("failed")

    @staticmethod
    def remove(rows: list[Job[Request]], evict: tuple[int, ...]) -> None:
        for row in evict:
            rows[row] = rows[-1]
            rows.pop()

    @property
    def living(self) -> list[Job[Request]]:
        return [job for job in self.jobs if job.state is not State.ENDED]

    @invariant()
    def every_request_ends_at_most_once(self) -> None:
        for job in self.jobs:
            assert len(job.work.ended) == (job.state is State.ENDED)

    @invariant()
    def counts_are_true(self) -> None:
        queued = sum(job.state is State.QUEUED for job in self.jobs)
        assert self.scheduler.queued == queued <= LIMITS.queue_requests
        assert self.scheduler.running == len(self.living) - queued
        assert self.scheduler.jobs() == self.living

    @invariant()
    def memory_holds(self) -> None:
        assert self.scheduler.charged_bytes <= LIMITS.cache_bytes
        held = sum(
            len(rows) * max((job.work.cached for job in rows), default=0) * lane.steps
            for lane, rows in self.batches.items()
        )
        held += sum(
            (job.lengths[0] if job.work.answered == 0 else WINDOW // 2) * job.lane.steps
            for job in self.prefills
        )
        held += sum(job.positions * job.lane.steps for job in self.searches)
        assert held <= LIMITS.cache_bytes

    @invariant()
    def running_work_is_never_starved(self) -> None:
        for job in self.living:
            if job.state is State.RUNNING and job.lane.kind != "classify":
                assert job.work.waited_calls <= TURNS + LIMITS.decode_rows

    def teardown(self) -> None:
        """Whatever is there comes to its end in bounded time, and leaves nothing."""
        tokens = sum(job.work.tokens_left for job in self.living)
        rows = sum(len(job.lengths) for job in self.living)
        for _ in range(TURNS + 2 * (tokens + rows) + len(LANES)):
            self.tick(None)
        assert not self.living, "something starved"
        assert self.scheduler.next(self.now_s) is None
        assert not any(self.batches.values()) and not self.searches
        assert (self.scheduler.queued, self.scheduler.running) == (0, 0)
        assert self.scheduler.charged_bytes == 0


Traffic.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestTraffic = Traffic.TestCase
