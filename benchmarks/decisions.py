"""What a decision costs: whether a request is taken in, and at how many steps, behind others.

The scheduler and the admission are those that serve. Nothing is run, so every request finds the
same others before it. Knows neither models nor HTTP.
"""

import random
import time
from contextlib import suppress

from serve.bundle import Manifest
from serve.engine.admission import Admission
from serve.engine.backlog import GenerationSize
from serve.engine.cost import LatencyModel
from serve.engine.job import Deadline, Job, LaneKey, Limits, PrefillCall
from serve.engine.scheduler import Scheduler
from serve.engine.work import Classification, Work
from serve.errors import ServeError

AHEAD = (0, 16, 64, 255)
LEFT, NAMED, DEADLINE = "left to the server", "steps and deadline", "deadline"
ASKED = (LEFT, NAMED, DEADLINE)
_RUNNING = 16  # of the generations ahead; the others wait
_LONG_S = 1800.0, 3600.0  # more than all that waits takes
_ANY_S = 0.5, 60.0  # enough for full steps, for fewer, or for none
_WORK = Classification([], lambda event: None)  # which is never run


def classify_seconds(
    manifest: Manifest, latency: LatencyModel, ahead: int, times: int
) -> list[float]:
    """Of requests with a deadline, behind so many."""
    chance = random.Random(ahead)
    scheduler, admission = _idle(latency, ahead)
    for _ in range(ahead):
        scheduler.add(_row(manifest, chance), 0.0)
    found = []
    for _ in range(times):
        job = _row(manifest, chance)
        begun_s = time.thread_time()
        admission.check([job], 0.0)
        found.append(time.thread_time() - begun_s)
    return found


def write_seconds(
    manifest: Manifest, latency: LatencyModel, ahead: int, asked: str, times: int
) -> list[float]:
    """Of generations, behind so many at all steps, of which half have a deadline."""
    chance = random.Random(ahead)
    scheduler, admission = _idle(latency, ahead)
    for place in range(ahead):
        scheduler.add(_text(manifest, chance, _LONG_S if place % 2 else None), 0.0)
        if place + 1 == _RUNNING:
            _read(scheduler)
    found = []
    for _ in range(times):
        job = _text(manifest, chance, None if asked == LEFT else _ANY_S)
        job.admitted = asked != NAMED
        size = GenerationSize(job.lengths[0], job.tokens_left)
        most = job.lane._replace(steps=manifest.full_steps)
        begun_s = time.thread_time()
        with suppress(ServeError):
            if job.admitted:
                admission.steps_for(most, manifest.steps, size, job.deadline, 0.0)
            admission.check([job], 0.0)
        found.append(time.thread_time() - begun_s)
    return found


def _idle(latency: LatencyModel, ahead: int) -> tuple[Scheduler[Work], Admission]:
    limits = Limits(queue_requests=ahead + _RUNNING, degrade_wait_s=0.5)
    scheduler: Scheduler[Work] = Scheduler(limits, lambda *_: 0, latency=latency)
    return scheduler, Admission(scheduler, latency, limits)


def _read(scheduler: Scheduler[Work]) -> None:
    """Let all that wait run."""
    while scheduler.queued:
        call = scheduler.next(0.0)
        if isinstance(call, PrefillCall) and call.job is not None:
            scheduler.prefilled(call.job, full=False)


def _row(manifest: Manifest, chance: random.Random) -> Job[Work]:
    key = LaneKey(manifest.name, "classify", manifest.full_steps, late=True)
    lengths = (manifest.text_input.max_tokens // 2,)
    deadline = Deadline(0.0, chance.uniform(*_LONG_S))
    return Job(key, _WORK, lengths, deadline=deadline, choices=manifest.steps)


def _text(
    manifest: Manifest, chance: random.Random, given_s: tuple[float, float] | None
) -> Job[Work]:
    most = manifest.text_input.max_tokens // 2
    prompt, tokens = chance.randint(1, most), chance.randint(1, most)
    return Job(
        LaneKey(manifest.name, "generate", chance.choice(manifest.steps)),
        _WORK,
        (prompt,),
        prompt + tokens,
        deadline=None if given_s is None else Deadline(0.0, chance.uniform(*given_s)),
        tokens_left=tokens,
    )
