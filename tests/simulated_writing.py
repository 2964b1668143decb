"""A server that writes, without HTTP, threads or models, on a clock of its own.

The engine is the real one; a call takes as long as a formula says, give or take some noise. Knows
only generation, each prompt read in one call.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve.bundle.manifest import Latency, LatencyEntry, Machine
from serve.engine.backlog import GenerationSize
from serve.engine.job import Deadline, Event, FailedEvent, LaneKey, Limits
from serve.errors import DeadlineLapsed, QueueFull, ServeError
from tests.stepped import SteppedEngine, generation

LADDER = (1, 2, 4, 8)
MODEL = "m"


def lane_of(steps: int) -> LaneKey:
    return LaneKey(MODEL, "generate", steps)


def decode_s(steps: int, rows: int) -> float:
    """Like a small decoder on two cores."""
    return 0.0004 + steps * (0.0003 + 0.0001 * rows)


def prefill_s(steps: int, prompt: int) -> float:
    return 0.0004 + steps * (0.0002 + 0.00004 * prompt)


@dataclass(eq=False)
class Wish:
    """What a client sent, and what became of it."""

    at_s: float
    prompt: int
    tokens: int
    given_s: float | None = None
    steps: int | None = None  # exact
    outcome: str = ""  # "done", "lapsed", or the code of an error
    taken: int = 0  # steps
    begun_s: float = 0.0
    ended_s: float = 0.0
    told_s: list[float] = field(default_factory=list)  # by each refusal

    @property
    def in_time(self) -> bool:
        late = self.given_s is not None and self.ended_s > self.at_s + self.given_s
        return self.outcome == "done" and not late


class WritingSimulation:
    """Runs wishes to their ends; whoever is refused comes back when told, some times."""

    def __init__(
        self, limits: Limits, retries: int = 0, noise: float = 0.05, most_lanes: int = 1
    ) -> None:
        self._retries, self._noise, self._random = retries, noise, random.Random(0)
        self._back: list[tuple[float, int, Wish]] = []
        self.engine = SteppedEngine(
            limits, self._during, most_lanes, names={MODEL: "generate"}, measured=_measured()
        )

    @property
    def now_s(self) -> float:
        return self.engine.now_s

    def run(self, wishes: Sequence[Wish]) -> None:
        """Until all that came has ended."""
        self._back = sorted((wish.at_s, index, wish) for index, wish in enumerate(wishes))
        while self._back or self.engine.jobs():
            self._arrive()
            if self.engine.step() is None and self._back:
                self.engine.now_s = max(self.now_s, self._back[0][0])

    def _arrive(self) -> None:
        """Whoever has come by now is queued or refused."""
        while self._back and self._back[0][0] <= self.now_s:
            _, index, wish = self._back.pop(0)
            try:
                self._submit(wish)
            except ServeError as error:
                wish.outcome, wish.ended_s = error.code, self.now_s
                if isinstance(error, QueueFull):
                    wish.told_s.append(error.retry_after_s)
                    if len(wish.told_s) <= self._retries:
                        self._back.append((self.now_s + error.retry_after_s, index, wish))
                        self._back.sort()

    def _submit(self, wish: Wish) -> None:
        deadline = None if wish.given_s is None else Deadline(wish.at_s, wish.given_s)
        choices = LADDER if wish.steps is None else (wish.steps,)
        asked = GenerationSize(wish.prompt, wish.tokens)
        steps = self.engine.steps_for(lane_of(choices[-1]), choices, asked, deadline)

        def deliver(event: Event) -> None:
            wish.outcome, wish.ended_s = "done", self.now_s
            if isinstance(event, FailedEvent):
                lapsed = isinstance(event.error, DeadlineLapsed)
                wish.outcome = "lapsed" if lapsed else event.error.code
            wish.begun_s = job.started_s or 0.0

        job = generation(lane_of(steps), wish.prompt, wish.tokens, deliver, deadline=deadline)
        self.engine.submit(job)
        wish.taken = steps

    def _during(self, kind: str, steps: int, rows: int, length: int) -> None:
        seconds = decode_s(steps, rows) if kind == "decode" else prefill_s(steps, length)
        self.engine.now_s += seconds * self._random.lognormvariate(0.0, self._noise)


def _measured() -> Latency:
    """What a bundle says of its machine, which is this one."""
    entries = []
    for steps in LADDER:
        for length in (16, 64, 128):
            times: list[tuple[Literal["prefill", "decode"], int, float]] = [
                ("decode", rows, decode_s(steps, rows)) for rows in (1, 4, 16)
            ]
            for kind, rows, seconds in [*times, ("prefill", 1, prefill_s(steps, length))]:
                found_ms = 1000 * seconds
                entries.append(LatencyEntry(steps, kind, rows, length, found_ms, found_ms))
    return Latency(Machine("cpu", 2, 2, "runtime"), "2026-01-01T00:00:00+00:00", tuple(entries))
