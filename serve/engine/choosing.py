"""The next token of every row of a call, chosen for all rows at once and taken in by each.

It deliberately knows neither calls nor who is told.
"""

from collections.abc import Sequence

import numpy as np

from serve.engine.ending import own
from serve.engine.events import Event, FailedEvent
from serve.engine.generation import Generation
from serve.engine.sampling import choose_tokens
from serve.engine.work import Work, work_as
from serve.errors import ModelFailure
from serve.runtime.protocol import FloatArray
from serve.scheduler.job import Job, State

_NO_NUMBERS = "the model's scores for the next token are not finite numbers"


def accept_tokens(jobs: Sequence[Job[Work]], logits: FloatArray) -> list[tuple[Job[Work], Event]]:
    """The next token of each job that still wants one, from logits (B, V)."""
    finite: list[bool] = np.logical_and.reduce(np.isfinite(logits), axis=1).tolist()  # (B,)
    good: list[int] = []
    works: list[Generation] = []
    events: list[tuple[Job[Work], Event]] = []
    for index, job in enumerate(jobs):
        if job.state is State.ENDED:
            continue
        if finite[index]:
            good.append(index)
            works.append(work_as(Generation, job))
        else:
            events.append((job, FailedEvent(ModelFailure(_NO_NUMBERS))))
    try:
        tokens = choose_tokens(
            [work.sampler for work in works],
            logits if len(good) == len(jobs) else logits[good],
            [work.completion_tokens for work in works],
        )
    except Exception as error:
        return [*events, *((jobs[index], FailedEvent(own(error, jobs[index]))) for index in good)]
    for index, work, token in zip(good, works, tokens, strict=True):
        try:
            events.append((jobs[index], work.accept(token, logits[index])))
        except Exception as error:
            events.append((jobs[index], FailedEvent(own(error, jobs[index]))))
    return events
