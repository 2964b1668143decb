"""Where the event loop waits for the engine, while it watches whether the client is still there.

Knows asyncio and events; deliberately neither models nor what the events are turned into.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from serve.engine.engine import Engine
from serve.engine.work import Work
from serve.scheduler.job import Job
from serve.wire.access import ID_KEY, JOBS_KEY

EventT = TypeVar("EventT")


class ClientGone(Exception):
    """Nobody is left to answer."""


class Mailbox(Generic[EventT]):
    """Events for one request. `deliver` is called on the event loop's own thread."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, event: EventT) -> None:
        self._events.append(event)
        self._notify()

    def leave(self) -> None:
        """The client has gone."""
        self._gone = True
        self._notify()

    async def take(self) -> list[EventT]:
        """All events that have come, at least one; ClientGone once the client has left."""
        while not self._events and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._gone:
            raise ClientGone
        events, self._events = self._events, []
        return events

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def submitted(
    engine: Engine, job: Job[Work], mailbox: Mailbox[Any], request: Request
) -> AbstractAsyncContextManager[None]:
    """The job is in the engine; whatever ends this block early takes it out again."""
    return all_submitted(engine, (job,), mailbox, request)


@asynccontextmanager
async def all_submitted(
    engine: Engine, jobs: Sequence[Job[Work]], mailbox: Mailbox[Any], request: Request
) -> AsyncIterator[None]:
    """The jobs of one request, which share its deadline, are in the engine: all, or none."""
    for job in jobs:
        job.request_id = request.scope[ID_KEY]
    request.scope.setdefault(JOBS_KEY, []).extend(jobs)
    engine.submit(*jobs)
    watcher = asyncio.create_task(_watch(request, mailbox))
    # The engine looks at deadlines between its calls; this holds even while one hangs.
    timer = None
    deadline = jobs[0].deadline
    if deadline is not None:
        left_s = deadline.ends_s - engine.clock()
        timer = asyncio.get_running_loop().call_later(max(0.0, left_s), engine.lapse, *jobs)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        watcher.cancel()
        for job in jobs:
            engine.cancel(job)


async def _watch(request: Request, mailbox: Mailbox[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    mailbox.leave()
