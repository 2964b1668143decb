"""What requests send, read and checked: quickly on the event loop, or on a thread where it takes
longer.

A large body waits for its turn to be checked, and a picture or a long text for its turn to be
read, one request at a time each, so that many cost the memory of one. Whoever waits here is in the
one queue of the server: counted with those that wait for a model, within the same limits, dropped
at its deadline, or when its client leaves.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

from starlette.requests import Request

from serve.engine.engine import Engine
from serve.engine.job import Deadline
from serve.errors import DeadlineLapsed, QueueFull
from serve.settings import Settings
from serve.wire.access import SERVED_KEY
from serve.wire.mailbox import ClientGone, watch_departure

T = TypeVar("T")

# Texts of more characters are encoded on the thread.
LONG_CHARACTERS = 4_000
# Bodies of more bytes are checked on the thread: smaller ones take the loop 2 ms at most.
LARGE_BODY_BYTES = 2**15
# That all that waits here may take together, unless one alone is larger.
UNREAD_BYTES = 2**28
WEIGHT_KEY = "stepdial.weight"  # bytes that a request takes until it has been read
# The part that the last turn has in what the next is thought to take.
_NEWEST = 0.2
_TRY_AGAIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Turn:
    """One request that waits for the thread, or has it."""

    work: Callable[[], Any]
    weight: int
    outcome: "asyncio.Future[Any]"


@final
class _Worker:
    """A thread, and those that wait for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turns: deque[_Turn] = deque()
        self._current: _Turn | None = None
        self._usual_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self._turns)

    @property
    def running(self) -> int:
        return int(self._current is not None)

    @property
    def weight(self) -> int:
        """Bytes of all that is here."""
        current = 0 if self._current is None else self._current.weight
        return current + sum(turn.weight for turn in self._turns)

    @property
    def wait_s(self) -> float:
        """How long all that is here will take."""
        return (self.waiting + self.running) * self._usual_s

    def add(self, turn: _Turn) -> None:
        self._turns.append(turn)
        self._begin()

    def drop(self, turn: _Turn) -> None:
        """Nobody waits for this any more; what has begun ends by itself."""
        with suppress(ValueError):
            self._turns.remove(turn)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if self._current is not None or not self._turns:
            return
        turn = self._current = self._turns.popleft()
        loop, began_s = asyncio.get_running_loop(), time.perf_counter()

        def end(done: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._end, turn, done, time.perf_counter() - began_s)

        self._thread.submit(turn.work).add_done_callback(end)

    def _end(self, turn: _Turn, done: "Future[Any]", seconds: float) -> None:
        self._current = None
        self._usual_s += _NEWEST * (seconds - self._usual_s)
        if not turn.outcome.done() and not done.cancelled():
            error = done.exception()
            if error is None:
                turn.outcome.set_result(done.result())
            else:
                turn.outcome.set_exception(error)
        self._begin()


@final
class Reader:
    """Reads for all routes of one application."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self._engine = engine
        self._checks = _Worker("check")
        self._reads = _Worker("read")
        engine.unread = self

    @property
    def waiting(self) -> int:
        """Requests that wait to be checked or read."""
        return self._checks.waiting + self._reads.waiting

    @property
    def running(self) -> int:
        """Requests that are being checked or read."""
        return self._checks.running + self._reads.running

    async def checked(self, request: Request, body: bytes, work: Callable[[], T]) -> T:
        """What `work` makes of a body."""
        if len(body) <= LARGE_BODY_BYTES:
            return work()
        return await self._turn(self._checks, request, work, len(body), None)

    async def read(
        self,
        request: Request,
        characters: int | None,
        deadline: Deadline | None,
        work: Callable[[], T],
    ) -> T:
        """What `work` makes of the inputs of a request.

        `characters` is how much text there is to read, None if it is something else.
        """
        if characters is not None and characters <= LONG_CHARACTERS:
            return work()
        weight: int = request.scope.get(WEIGHT_KEY, 0)
        return await self._turn(self._reads, request, work, weight, deadline)

    def close(self) -> None:
        """Nobody is left to read for."""
        self._checks.close()
        self._reads.close()

    async def _turn(
        self,
        worker: _Worker,
        request: Request,
        work: Callable[[], T],
        weight: int,
        deadline: Deadline | None,
    ) -> T:
        self._check_place(worker, weight, deadline)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        turn = _Turn(work, weight, outcome)
        worker.add(turn)
        unwatch = watch_departure(request, partial(_fail, outcome, ClientGone()))
        timer = None
        if deadline is not None:
            left_s = max(0.0, deadline.ends_s - self._engine.clock())
            timer = loop.call_later(left_s, _fail, outcome, DeadlineLapsed(deadline.given_s))
        try:
            return await outcome
        except DeadlineLapsed:
            model = request.scope[SERVED_KEY][0]
            self._engine.metrics.deadlines.labels(model).inc()
            self._engine.metrics.lapsed.labels(model).inc()
            raise
        except ClientGone:
            self._engine.metrics.cancelled.inc()
            raise
        finally:
            worker.drop(turn)
            unwatch()
            if timer is not None:
                timer.cancel()

    def _check_place(self, worker: _Worker, weight: int, deadline: Deadline | None) -> None:
        """QueueFull, TooBusy or DeadlineLapsed unless a request may wait for this worker."""
        self._engine.check_unread(worker.wait_s, deadline)
        here = self._checks.weight + self._reads.weight
        if here and here + weight > UNREAD_BYTES:
            raise QueueFull(
                f"what waits to be read fills the {UNREAD_BYTES >> 20} MiB that there are for it: "
                "try again later",
                retry_after_s=max(_TRY_AGAIN_S, worker.wait_s),
            )


def _fail(outcome: "asyncio.Future[Any]", error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
