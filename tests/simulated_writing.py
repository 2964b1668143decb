"""A server that writes, without HTTP, threads or models, on a clock of its own.

The scheduler, the latency model and the admission are the real ones; a call takes as long as a
formula says, give or take some noise. Knows only generation, each prompt read in one call.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from serve.bundle.manifest import Latency, LatencyEntry, Machine
from serve.engine.admission import Admission
from serve.engine.backlog import GenerationSize
from serve.engine.cost import CostKey, LatencyModel
from serve.engine.job import (
    Call,
    CallKind,
    Deadline,
    DecodeCall,
    Job,
    LaneKey,
    Limits,
    PrefillCall,
    State,
)
from serve.engine.scheduler import Scheduler
from serve.errors import QueueFull, ServeError

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
        self.now_s = 0.0
        self.latency = LatencyModel()
        self.scheduler: Scheduler[Wish] = Scheduler(
            limits, lambda key, rows, positions: 0, lambda key: most_lanes, self.latency
        )
        self.admission = Admission(cast(Any, self.scheduler), self.latency, limits)
        self._retries, self._noise, self._random = retries, noise, random.Random(0)
        self._back: list[tuple[float, int, Wish]] = []
        self.latency.learn(MODEL, _measured())

    def run(self, wishes: Sequence[Wish]) -> None:
        """Until all that came has ended."""
        self._back = sorted((wish.at_s, index, wish) for index, wish in enumerate(wishes))
        while self._back or self.scheduler.jobs():
            self._arrive()
            for job in self.scheduler.lapsed(self.now_s):
                self._end(job, "lapsed")
            call = self.scheduler.next(self.now_s)
            if call is not None:
                self._call(call)
            elif self._back:
                self.now_s = max(self.now_s, self._back[0][0])

    def _arrive(self) -> None:
        """Whoever has come by now is queued or refused."""
        while self._back and self._back[0][0] <= self.now_s:
            _, index, wish = self._back.pop(0)
            try:
                job = self._admitted(wish)
            except ServeError as error:
                wish.outcome, wish.ended_s = error.code, self.now_s
                if isinstance(error, QueueFull):
                    wish.told_s.append(error.retry_after_s)
                    if len(wish.told_s) <= self._retries:
                        self._back.append((self.now_s + error.retry_after_s, index, wish))
                        self._back.sort()
                continue
            self.scheduler.add(job, self.now_s)

    def _admitted(self, wish: Wish) -> Job[Wish]:
        deadline = None if wish.given_s is None else Deadline(wish.at_s, wish.given_s)
        choices = LADDER if wish.steps is None else (wish.steps,)
        asked = GenerationSize(wish.prompt, wish.tokens)
        steps = self.admission.steps_for(lane_of(choices[-1]), choices, asked, deadline, self.now_s)
        positions = wish.prompt + wish.tokens
        job = Job(lane_of(steps), wish, (wish.prompt,), positions, deadline=deadline)
        job.tokens_left = wish.tokens
        self.admission.check((cast(Any, job),), self.now_s)
        wish.taken = steps
        return job

    def _call(self, call: Call[Wish]) -> None:
        if isinstance(call, PrefillCall):
            job = call.job
            if job is None:
                return
            self._spend("prefill", call.lane.steps, 1, job.lengths[0])
            job.work.begun_s = job.started_s or 0.0
            if job.state is not State.ENDED:
                self.scheduler.prefilled(job, full=False)
                self._token(job)
            return
        assert isinstance(call, DecodeCall)
        rows = sum(len(part.jobs) for part in call.parts)
        if rows and call.parts[0].whole:
            longest = max(sum(job.lengths) + job.work.tokens for job in call.parts[0].jobs)
            self._spend("decode", call.lane.steps, rows, longest)
        elif rows:  # one step, and for some the beginning or the end of a token
            self.now_s += decode_s(1, rows)
        for part in call.parts:
            if part.ends:
                for job in part.jobs:
                    if job.state is not State.ENDED:
                        self._token(job)
                self.scheduler.evict(part.lane)

    def _token(self, job: Job[Wish]) -> None:
        job.tokens_left -= 1
        if job.tokens_left == 0:
            self._end(job, "done")

    def _end(self, job: Job[Wish], outcome: str) -> None:
        if self.scheduler.end(job):
            job.work.outcome, job.work.ended_s = outcome, self.now_s

    def _spend(self, kind: CallKind, steps: int, rows: int, length: int) -> None:
        seconds = decode_s(steps, rows) if kind == "decode" else prefill_s(steps, length)
        seconds *= self._random.lognormvariate(0.0, self._noise)
        self.now_s += seconds
        self.latency.observe(CostKey(MODEL, kind, steps), rows, length, seconds)


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
