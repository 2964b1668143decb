"""Random arrivals, departures, full windows and failures, against models that only count.

Every request ends exactly once, none starves, no limit is ever exceeded, and nothing is left over.
"""

from dataclasses import dataclass, field
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.engine.classify import Batch
from serve.engine.job import Event, FailedEvent, Job, Kind, LaneKey, Limits, State, TokenEvent
from serve.engine.loaded import Call
from serve.errors import QueueFull
from tests.examples import examples
from tests.stepped import (
    CountedModel,
    SteppedEngine,
    classification,
    generation,
    parts,
    translation,
)

WINDOW = 12
LIMITS = Limits(queue_requests=6, batch_rows=3, batch_tokens=24, decode_rows=2, cache_bytes=100)
NAMES = {
    "c": "classify",
    "d": "classify",
    "g": "generate",
    "h": "generate",
    "t": "translate",
    "u": "translate",
}
KINDS: dict[str, Kind] = {"classify": "classify", "generate": "generate", "translate": "search"}
LANES = [LaneKey(name, KINDS[task], steps) for name, task in NAMES.items() for steps in (1, 4)]
MOST_LANES = {"g": 2}  # that share a call
# Turns there can be: two for each generation lane, one for each other.
TURNS = sum(2 if lane.kind == "generate" else 1 for lane in LANES)


@dataclass(eq=False)
class Request:
    """What a client waits for."""

    job: Job | None = None
    waited_calls: int = 0
    ended: list[str] = field(default_factory=list)

    def deliver(self, event: Event) -> None:
        if not isinstance(event, TokenEvent):
            self.ended.append("failed" if isinstance(event, FailedEvent) else "done")


class Traffic(RuleBasedStateMachine):
    """Drives an engine as its thread and its clients do."""

    def __init__(self) -> None:
        super().__init__()
        self.throws = False
        self.engine = SteppedEngine(
            LIMITS, self.during, most_lanes=MOST_LANES, pieces=2, names=NAMES
        )
        for model in self.models:
            model.window = WINDOW
        self.requests: list[Request] = []

    @property
    def models(self) -> list[CountedModel]:
        return [cast(CountedModel, self.engine.model(name).runtime) for name in NAMES]

    def during(self, kind: str, steps: int, rows: int, length: int) -> None:
        self.engine.now_s += 0.001
        self.memory_holds()
        if self.throws:
            raise RuntimeError("out of luck")

    @rule(
        lane=st.sampled_from(LANES),
        lengths=st.lists(st.integers(1, WINDOW), min_size=1, max_size=5),
        max_tokens=st.integers(1, 20),
    )
    def arrive(self, lane: LaneKey, lengths: list[int], max_tokens: int) -> None:
        self.engine.now_s += 1.0
        request = Request()
        if lane.kind == "classify":
            job = classification(lane, lengths, request.deliver)
        elif lane.kind == "search":
            job = translation(lane, lengths[0], max_tokens, request.deliver)
        else:
            job = generation(
                lane,
                *(lengths[0], max_tokens, request.deliver, WINDOW),
                positions=min(lengths[0] + max_tokens, WINDOW),
            )
        full = self.engine.queued == LIMITS.queue_requests
        try:
            self.engine.submit(job)
            assert not full
        except QueueFull:
            assert full
            return
        request.job = job
        self.requests.append(request)

    @rule(data=st.data())
    @precondition(lambda self: self.living)
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.living))
        assert request.job is not None and self.engine.cancel(request.job)
        request.ended.append("left")

    @rule(failure=st.sampled_from([None, None, None, "row", "call"]))
    def tick(self, failure: str | None) -> None:
        living = self.living
        running = [one for one in living if one.job and one.job.state is State.RUNNING]
        self.throws = failure == "call"
        for model in self.models:
            model.spoils = failure == "row"
        call = self.engine.step()
        if call is None or call.kind is None:  # nothing, or the check of a model that threw
            assert not living, "work is left, and nothing of it may run"
            return
        for one in running:
            one.waited_calls += 1
        for one in self.requests:
            if one.job in call.jobs:
                one.waited_calls = 0
        self.check(call)

    def check(self, call: Call) -> None:
        assert call.jobs and {job.lane.model for job in call.jobs} == {call.lane.model}
        if isinstance(call.what, Batch):
            lengths = [job.lengths[row] for job, row in call.what.rows]
            assert 1 <= len(lengths) <= LIMITS.batch_rows
            assert len(lengths) == 1 or len(lengths) * max(lengths) <= LIMITS.batch_tokens
            assert len(set(call.what.rows)) == len(call.what.rows)
        elif call.kind == "decode":
            assert len({part.lane for part in parts(call)}) == len(parts(call))
            assert len(parts(call)) <= MOST_LANES.get(call.lane.model, 1)
            if len(parts(call)) > 1:
                assert len(call.jobs) <= LIMITS.decode_rows
            assert all(0 < len(part.jobs) <= LIMITS.decode_rows for part in parts(call))

    @property
    def living(self) -> list[Request]:
        return [one for one in self.requests if one.job and one.job.state is not State.ENDED]

    @invariant()
    def every_request_ends_at_most_once(self) -> None:
        for one in self.requests:
            assert one.job is not None
            assert len(one.ended) == (one.job.state is State.ENDED)

    @invariant()
    def counts_are_true(self) -> None:
        jobs = [one.job for one in self.living if one.job]
        queued = sum(job.state is State.QUEUED for job in jobs)
        assert self.engine.queued == queued <= LIMITS.queue_requests
        assert self.engine.running == len(jobs) - queued
        assert self.engine.jobs() == jobs

    @invariant()
    def memory_holds(self) -> None:
        assert self.engine.charged_bytes <= LIMITS.cache_bytes
        assert sum(lane.nbytes for lane in self.engine._common.cached()) <= LIMITS.cache_bytes

    @invariant()
    def running_work_is_never_starved(self) -> None:
        for one in self.living:
            assert one.job is not None
            if one.job.state is State.RUNNING and one.job.lane.kind != "classify":
                assert one.waited_calls <= TURNS + LIMITS.decode_rows

    def teardown(self) -> None:
        """Whatever is there comes to its end in bounded time, and leaves nothing."""
        jobs = [one.job for one in self.living if one.job]
        work = sum(job.tokens_left + len(job.lengths) for job in jobs)
        for _ in range(4 * TURNS + 3 * work + len(LANES)):
            if not self.living:
                break
            self.tick(None)
        assert not self.living, "something starved"
        self.engine.step()
        assert (self.engine.queued, self.engine.running) == (0, 0)
        assert self.engine.charged_bytes == self.engine.cache_bytes == 0
        for lane in self.engine._common.cached():
            assert not lane.waiting and not lane.occupants()


Traffic.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=60, deadline=None
)
TestTraffic = Traffic.TestCase
