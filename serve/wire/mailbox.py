"""Where the event loop waits for the engine, while it watches whether the client is still there.

Knows asyncio and events; deliberately neither models nor what the events are turned into.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from serve.engine.engine import Engine
from serve.engine.events import Event
from serve.engine.work import Work
from serve.scheduler.job import Job


class ClientGone(Exception):
    """Nobody is left to answer."""


class Mailbox:
    """Events for one request. `deliver` is called on the event loop's own thread."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, event: Event) -> None:
        self._events.append(event)
        self._notify()

    def leave(self) -> None:
        """The client has gone."""
        self._gone = True
        self._notify()

    async def take(self) -> list[Event]:
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


@asynccontextmanager
async def submitted(
    engine: Engine, job: Job[Work], mailbox: Mailbox, request: Request
) -> AsyncIterator[None]:
    """The job is in the engine; whatever ends this block early takes it out again."""
    engine.submit(job)
    watcher = asyncio.create_task(_watch(request, mailbox))
    # The engine looks at deadlines between its calls; this holds even while one hangs.
    timer = None
    if job.deadline is not None:
        left_s = job.deadline.ends_s - engine.clock()
        timer = asyncio.get_running_loop().call_later(max(0.0, left_s), engine.lapse, job)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        watcher.cancel()
        engine.cancel(job)


async def _watch(request: Request, mailbox: Mailbox) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    mailbox.leave()
