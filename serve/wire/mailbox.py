"""Where the event loop waits for the engine, while it watches whether the client is still there.

Knows asyncio and events; deliberately neither models nor what the events are turned into.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from serve.engine.engine import Engine
from serve.engine.job import Job
from serve.engine.work import Work
from serve.wire.access import ID_KEY, JOBS_KEY
from serve.wire.departure import DEPARTURE_KEY, Departure
from serve.wire.gate import return_tokens, spend_tokens

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


class Submitted:
    """The jobs of one request, which share its deadline, are in the engine: all, or none.

    Whatever ends this block early takes them out again.
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[Job[Work]],
        mailbox: Mailbox[Any],
        request: Request,
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._mailbox = mailbox
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[], object] = _nothing

    def __enter__(self) -> None:
        scope = self._request.scope
        for job in self._jobs:
            job.request_id = scope[ID_KEY]
        scope.setdefault(JOBS_KEY, []).extend(self._jobs)
        tokens = sum(map(_tokens, self._jobs))
        spend_tokens(scope, tokens)
        try:
            self._engine.submit(*self._jobs)
        except BaseException:
            return_tokens(scope, tokens)
            raise
        self._unwatch = watch_departure(self._request, self._mailbox.leave)
        # The engine looks at deadlines between its calls; this holds even while one hangs.
        deadline = self._jobs[0].deadline
        if deadline is not None:
            left_s = max(0.0, deadline.ends_s - self._engine.clock())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_s, self._engine.lapse, *self._jobs)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unwatch()
        for job in self._jobs:
            self._engine.cancel(job)
        # Those that were to be written, and were not.
        return_tokens(self._request.scope, sum(job.tokens_left * job.beams for job in self._jobs))


def _tokens(job: Job[Work]) -> int:
    """What a job reads, and writes at most, on every beam."""
    return sum(job.lengths) + job.tokens_left * job.beams


def watch_departure(request: Request, leave: Callable[[], None]) -> Callable[[], object]:
    """Have `leave` called when the client leaves; returns what ends that."""
    departure: Departure | None = request.scope.get(DEPARTURE_KEY)
    if departure is None:  # behind another server than ours
        return asyncio.create_task(_await_departure(request, leave)).cancel
    return departure.watch(leave)


async def _await_departure(request: Request, leave: Callable[[], None]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    leave()


def _nothing() -> None:
    pass
