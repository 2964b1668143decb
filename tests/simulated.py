"""A server without HTTP, threads or models, on a clock of its own: arrivals in, outcomes out.

The scheduler, the latency model and the admission are the real ones; a call takes as long as a
formula says, give or take some noise. Knows only classification.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from serve.engine.admission import Admission
from serve.engine.cost import CostKey, LatencyModel
from serve.engine.job import ClassifyCall, Deadline, Job, LaneKey, Limits, State
from serve.engine.scheduler import Scheduler
from serve.errors import ServeError

LADDER = (1, 2, 4, 8)
MODEL = "m"
LATE = LaneKey(MODEL, "classify", LADDER[-1], late=True)

Cost = Callable[[int, int, int], float]  # seconds of steps, rows, length


def usual_cost(steps: int, rows: int, length: int) -> float:
    """Like a small classifier on two cores."""
    return 0.0007 + steps * (0.0003 + 1.6e-5 * rows * length + 3e-8 * rows * length**2)


@dataclass(eq=False)
class Request:
    """What a client sent, and what became of it."""

    at_s: float
    lengths: tuple[int, ...]
    given_s: float | None = None
    choices: tuple[int, ...] = LADDER
    steps: int | None = None  # exact
    outcome: str = ""  # "done", "lapsed", "left", or the code of an error
    ended_s: float = 0.0
    taken: list[int] = field(default_factory=list)  # steps of each row
    retry_after_s: float = 0.0

    @property
    def in_time(self) -> bool:
        late = self.given_s is not None and self.ended_s > self.at_s + self.given_s
        return self.outcome == "done" and not late


class Simulation:
    """Runs requests to their ends."""

    def __init__(
        self, limits: Limits, cost: Cost = usual_cost, noise: float = 0.05, seed: int = 0
    ) -> None:
        self.now_s = 0.0
        self.latency = LatencyModel()
        self.scheduler: Scheduler[Request] = Scheduler(
            limits, lambda key, rows, positions: 0, latency=self.latency
        )
        # The admission knows nothing of the work that a job carries.
        self.admission = Admission(cast(Any, self.scheduler), self.latency, limits)
        self.calls: list[ClassifyCall[Request]] = []
        self._cost, self._noise, self._random = cost, noise, random.Random(seed)
        for steps in LADDER:
            for rows, length in ((1, 32), (1, 128), (8, 32), (8, 128), (16, 64)) * 8:
                cost_key = CostKey(MODEL, "classify", steps)
                self.latency.observe(cost_key, rows, length, cost(steps, rows, length))

    def run(self, requests: Sequence[Request]) -> None:
        """Until all that came has ended."""
        arrivals = sorted(requests, key=lambda request: request.at_s)[::-1]
        while arrivals or self.scheduler.jobs():
            while arrivals and arrivals[-1].at_s <= self.now_s:
                self.arrive(arrivals.pop())
            if not self.call(arrivals) and arrivals:
                self.now_s = max(self.now_s, arrivals[-1].at_s)

    def arrive(self, request: Request) -> Job[Request] | None:
        """A request comes; it is queued or refused at once."""
        deadline = None if request.given_s is None else Deadline(request.at_s, request.given_s)
        lane = LATE if request.steps is None else LaneKey(MODEL, "classify", request.steps)
        choices = request.choices if request.steps is None else ()
        job = Job(lane, request, request.lengths, deadline=deadline, choices=choices)
        try:
            self.admission.check((cast(Any, job),), max(self.now_s, request.at_s))
        except ServeError as error:
            self.end(request, error.code, request.at_s)
            request.retry_after_s = getattr(error, "retry_after_s", 0.0)
            return None
        self.scheduler.add(job, request.at_s)
        return job

    def call(self, arrivals: list[Request]) -> bool:
        """One call of the runtime, and whoever comes meanwhile."""
        for job in self.scheduler.lapsed(self.now_s):
            if self.scheduler.end(job):
                self.end(job.work, "lapsed", self.now_s)
        call = self.scheduler.next(self.now_s)
        if call is None:
            return False
        assert isinstance(call, ClassifyCall)
        self.calls.append(call)
        rows, length = len(call.rows), call.length
        seconds = self._cost(call.steps, rows, length)
        seconds *= self._random.lognormvariate(0.0, self._noise)
        ends_s = self.now_s + seconds
        while arrivals and arrivals[-1].at_s <= ends_s:
            self.now_s = arrivals[-1].at_s
            self.arrive(arrivals.pop())
        self.now_s = ends_s
        self.latency.observe(CostKey(MODEL, "classify", call.steps), rows, length, seconds)
        for job, _ in call.rows:
            job.work.taken.append(call.steps)
            if self.scheduler.row_done(job):
                self.end(job.work, "done", self.now_s)
        return True

    def end(self, request: Request, outcome: str, at_s: float) -> None:
        assert not request.outcome, f"ended twice: {request.outcome}, then {outcome}"
        request.outcome, request.ended_s = outcome, at_s

    @property
    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        jobs = self.scheduler.jobs()
        assert all(job.state is not State.ENDED for job in jobs)
        return not jobs and (self.scheduler.queued, self.scheduler.running) == (0, 0)


def poisson(
    rate: float, seconds: float, seed: int, given_s: float | None, **fields: Any
) -> list[Request]:
    """Requests of one row that come by chance."""
    chance = random.Random(seed)
    at_s, found = 0.0, []
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        length = min(128, max(8, round(chance.lognormvariate(4.0, 0.3))))
        found.append(Request(at_s, (length,), given_s, **fields))
    return found


def capacity(steps: int, cost: Cost = usual_cost) -> float:
    """Requests a second at these steps, in full batches of usual length."""
    return 16 / cost(steps, 16, 64)
