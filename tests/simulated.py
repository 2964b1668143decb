"""A server without HTTP, threads or models, on a clock of its own: arrivals in, outcomes out.

The engine is the real one; a call takes as long as a formula says, give or take some noise. Knows
only classification.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.engine.classify import Batch
from serve.engine.cost import CostKey
from serve.engine.job import ClassifiedEvent, Deadline, Event, FailedEvent, Job, LaneKey, Limits
from serve.errors import DeadlineLapsed, ServeError
from tests.stepped import SteppedEngine, classification

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
    least_s: float | None = None  # of an impossible deadline

    @property
    def in_time(self) -> bool:
        late = self.given_s is not None and self.ended_s > self.at_s + self.given_s
        return self.outcome == "done" and not late


class Simulation:
    """Runs requests to their ends."""

    def __init__(
        self, limits: Limits, cost: Cost = usual_cost, noise: float = 0.05, seed: int = 0
    ) -> None:
        self.engine = SteppedEngine(limits, self._during, names={MODEL: "classify"})
        self.cost = self.engine.model(MODEL).cost
        self.calls: list[Batch] = []
        self._arrivals: list[Request] = []  # latest first
        self._seconds, self._noise, self._random = cost, noise, random.Random(seed)
        for steps in LADDER:
            for rows, length in ((1, 32), (1, 128), (8, 32), (8, 128), (16, 64)) * 8:
                self.cost.observe(
                    CostKey("classify", steps), rows, length, cost(steps, rows, length)
                )

    @property
    def now_s(self) -> float:
        return self.engine.now_s

    def run(self, requests: Sequence[Request]) -> None:
        """Until all that came has ended."""
        self._arrivals = arrivals = sorted(requests, key=lambda request: request.at_s)[::-1]
        while arrivals or self.engine.jobs():
            while arrivals and arrivals[-1].at_s <= self.now_s:
                self.arrive(arrivals.pop())
            if not self.call() and arrivals:
                self.engine.now_s = max(self.now_s, arrivals[-1].at_s)

    def arrive(self, request: Request) -> Job | None:
        """A request comes; it is queued or refused at once."""
        self.engine.now_s = max(self.now_s, request.at_s)
        deadline = None if request.given_s is None else Deadline(request.at_s, request.given_s)
        lane = LATE if request.steps is None else LaneKey(MODEL, "classify", request.steps)
        choices = request.choices if request.steps is None else ()

        def deliver(event: Event) -> None:
            if isinstance(event, ClassifiedEvent):
                request.taken.extend(event.steps)
                self.end(request, "done")
            else:
                assert isinstance(event, FailedEvent)
                lapsed = isinstance(event.error, DeadlineLapsed)
                self.end(request, "lapsed" if lapsed else event.error.code)

        job = classification(lane, request.lengths, deliver, deadline=deadline, choices=choices)
        try:
            self.engine.submit(job)
        except ServeError as error:
            self.end(request, error.code)
            request.retry_after_s = getattr(error, "retry_after_s", 0.0)
            if (least_ms := error.details.get("least_ms")) is not None:
                request.least_s = least_ms / 1000
            return None
        return job

    def call(self) -> bool:
        """Let the engine make one call of the model; False if there is nothing to do."""
        call = self.engine.step()
        if call is not None:
            self.calls.append(call.what)
        return call is not None

    def end(self, request: Request, outcome: str) -> None:
        assert not request.outcome, f"ended twice: {request.outcome}, then {outcome}"
        request.outcome, request.ended_s = outcome, self.now_s

    @property
    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        return not self.engine.jobs() and (self.engine.queued, self.engine.running) == (0, 0)

    def _during(self, kind: str, steps: int, rows: int, length: int) -> None:
        seconds = self._seconds(steps, rows, length)
        ends_s = self.now_s + seconds * self._random.lognormvariate(0.0, self._noise)
        while self._arrivals and self._arrivals[-1].at_s <= ends_s:
            self.arrive(self._arrivals.pop())
        self.engine.now_s = ends_s


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
