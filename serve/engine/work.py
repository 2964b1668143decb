"""What a job carries through the engine, and what comes of it."""

from typing import TypeVar

from serve.engine.classification import Classification
from serve.engine.events import Deliver, Event
from serve.engine.generation import Generation
from serve.engine.translation import Translation
from serve.scheduler.job import Job

Work = Classification | Generation | Translation
Deliveries = list[tuple[Deliver, Event]]

WorkT = TypeVar("WorkT", Classification, Generation, Translation)


def work_as(kind: type[WorkT], job: Job[Work]) -> WorkT:
    """The work of a job of which the lane says what it is."""
    assert isinstance(job.work, kind)
    return job.work
