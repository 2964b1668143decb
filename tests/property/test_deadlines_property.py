"""Random classifications with budgets, deadlines and departures, on a clock of its own.

Every request ends exactly once, nothing runs whose deadline has passed, no batch is over its
limits, none starves, and nothing is left over.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve.engine.classify import Batch
from serve.engine.job import Job, Limits, State
from tests.examples import examples
from tests.simulated import LADDER, Request, Simulation

LIMITS = Limits(
    queue_requests=8, batch_rows=4, batch_tokens=300, queue_wait_s=2.0, degrade_wait_s=0.2
)
# An ordinary row is treated as due a second after it came, and calls take up to a tenth of one.
PATIENCE_CALLS = 60


class Watched(Simulation):
    """A simulation that looks at every call."""

    def __init__(self) -> None:
        super().__init__(LIMITS, noise=0.3)
        self.living: dict[Request, Job] = {}
        self.waited_calls: dict[Job, int] = {}
        self.all: list[Request] = []

    def arrive(self, request: Request) -> Job | None:
        self.all.append(request)
        job = super().arrive(request)
        if job is not None:
            self.living[request] = job
            self.waited_calls[job] = 0
        return job

    def end(self, request: Request, outcome: str) -> None:
        super().end(request, outcome)
        job = self.living.pop(request, None)
        if job is not None:
            del self.waited_calls[job]

    def call(self) -> bool:
        before, began_s = len(self.calls), self.now_s
        for job in self.waited_calls:
            self.waited_calls[job] += 1
        ran = super().call()
        for batch in self.calls[before:]:
            self.check(batch, began_s)
        return ran

    def check(self, batch: Batch, began_s: float) -> None:
        lengths = [job.lengths[row] for job, row in batch.rows]
        assert 1 <= len(lengths) <= LIMITS.batch_rows
        assert len(lengths) == 1 or len(lengths) * max(lengths) <= LIMITS.batch_tokens
        assert len(set(batch.rows)) == len(batch.rows)
        assert len({job.lane for job, _ in batch.rows}) == 1
        for job, _ in batch.rows:
            if job in self.waited_calls:
                self.waited_calls[job] = 0
            assert batch.steps in (job.choices or (job.lane.steps,))
            if job.deadline is not None:
                assert job.deadline.ends_s > began_s, "work for a deadline that had passed"


class Traffic(RuleBasedStateMachine):
    """Drives a scheduler as the engine and its clients do."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Watched()

    @rule(
        lengths=st.lists(st.integers(1, 128), min_size=1, max_size=6),
        given_ms=st.none() | st.integers(1, 500),
        steps=st.none() | st.sampled_from(LADDER),
        limits=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def ask(
        self,
        lengths: list[int],
        given_ms: int | None,
        steps: int | None,
        limits: tuple[int, int],
    ) -> None:
        given_s = None if given_ms is None else given_ms / 1000
        choices = LADDER[min(limits) : max(limits) + 1]
        request = Request(self.simulation.now_s, tuple(lengths), given_s, choices, steps)
        self.simulation.arrive(request)

    @rule(count=st.integers(1, 12), given_ms=st.integers(20, 200))
    def crowd(self, count: int, given_ms: int) -> None:
        for _ in range(count):
            self.simulation.arrive(Request(self.simulation.now_s, (64,), given_ms / 1000))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.simulation.living:
            request = data.draw(st.sampled_from(list(self.simulation.living)))
            assert self.simulation.engine.cancel(self.simulation.living[request])
            self.simulation.end(request, "left")

    @rule()
    def tick(self) -> None:
        queued = self.simulation.engine.queued
        if not self.simulation.call():
            assert not self.simulation.engine.jobs(), f"{queued} wait, and nothing may run"

    @rule(milliseconds=st.integers(1, 300))
    def pause(self, milliseconds: int) -> None:
        self.simulation.engine.now_s += milliseconds / 1000

    @invariant()
    def counts_are_true(self) -> None:
        simulation = self.simulation
        living = list(simulation.living.values())
        queued = sum(job.state is State.QUEUED for job in living)
        assert simulation.engine.queued == queued <= LIMITS.queue_requests
        assert simulation.engine.running == len(living) - queued
        assert simulation.engine.jobs() == sorted(living, key=lambda job: job.number)

    @invariant()
    def none_starves(self) -> None:
        assert all(calls <= PATIENCE_CALLS for calls in self.simulation.waited_calls.values())

    @invariant()
    def answers_are_whole(self) -> None:
        for request in self.simulation.all:
            assert bool(request.outcome) == (request not in self.simulation.living)
            if request.outcome == "done":
                assert len(request.taken) == len(request.lengths)

    def teardown(self) -> None:
        """Whatever is there comes to its end, and leaves nothing."""
        self.simulation.run([])
        assert self.simulation.idle and not self.simulation.living
        assert self.simulation.engine.step() is None


Traffic.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=50, deadline=None
)
TestTraffic = Traffic.TestCase
