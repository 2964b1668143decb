"""Requests that wait for a thread which reads their bodies."""

import asyncio

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
