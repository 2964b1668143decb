"""Requests that wait for a thread which reads their bodies."""

import asyncio
import threading

import pytest

from serve.api.body import _ReaderThread, _Waiting
from serve.engine.job import Unread


class Body:
    def __call__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise AssertionError("a body of a megabyte takes milliseconds to write")


def test_leaving_the_queue_writes_no_body() -> None:
    async def leave() -> int:
        worker = _ReaderThread("test", Unread())
        turn = _Waiting(Body(), 1, asyncio.get_running_loop().create_future())
        worker.add(turn)
        worker.drop(turn)  # it runs already, or has ended
        found: int = await turn.outcome
        worker.drop(turn)
        worker.close()
        return found

    assert asyncio.run(leave()) == 1


def test_a_thread_that_cannot_start_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def ask() -> int:
        loop, unread = asyncio.get_running_loop(), Unread()
        worker = _ReaderThread("test", unread)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
            patched.setattr(threading.Thread, "start", start)
            worker.add(_Waiting(Body(), 1, loop.create_future()))
        assert worker.weight == worker.wait_s == 0 and unread == Unread()
        turn = _Waiting(Body(), 1, loop.create_future())
        worker.add(turn)
        found: int = await asyncio.wait_for(turn.outcome, 5)
        worker.close()
        return found

    assert asyncio.run(ask()) == 1
