"""Requests that wait for a thread which reads their bodies."""

import asyncio
import gc
import threading

import httpx
import pytest

from serve.api.body import _ReaderThread, _Waiting
from serve.app import create_app
from serve.engine.job import Limits, Unread
from serve.inputs.rows import Input
from serve.settings import Settings
from tests.engine_bench import Bench
from tests.fake_model import Mood


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


@pytest.mark.parametrize("text", ["read at once", "read on the thread " * 500])
def test_of_an_input_that_has_been_read_only_its_rows_wait_for_the_model(text: str) -> None:
    """A picture as lists of numbers is thousands of times larger than its row."""
    bench = Bench(Mood(), Limits())
    settings = Settings(threads=1)
    body = {"model": "tiny-classify", "input": [text, "another"], "steps": 2}

    def inputs() -> int:
        return sum(type(one) is Input for one in gc.get_objects())

    async def ask() -> tuple[int, int]:
        loop, engine, before = asyncio.get_running_loop(), bench.engine, inputs()
        engine.start(loop.call_soon_threadsafe, loop.call_soon)
        transport = httpx.ASGITransport(create_app(settings, engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://tests") as client:
            bench.mood.gate.clear()
            asked = asyncio.create_task(client.post("/v1/classify", json=body))
            while not engine._jobs.running:
                await asyncio.sleep(0.001)
            held = inputs() - before
            bench.mood.gate.set()
            status = (await asked).status_code
        await asyncio.to_thread(engine.stop)
        return status, held

    assert asyncio.run(asyncio.wait_for(ask(), 20)) == (200, 0)
