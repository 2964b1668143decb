"""Bodies that are still arriving: together they have a limit, as those that wait have."""

import asyncio
import gzip
import threading
from typing import Any

import pytest

from serve.api import body
from serve.api.body import Reader, read_body
from serve.engine.job import Limits
from serve.errors import QueueFull
from serve.exchange import Exchange
from serve.settings import Settings
from tests.stepped import SteppedEngine


def test_bodies_that_arrive_together_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "UNREAD_BYTES", 1000)
    reader = Reader(Settings(), SteppedEngine(Limits()))
    with reader.receiving() as first:
        first(600)
        with reader.receiving() as second:
            second(400)
            with pytest.raises(QueueFull, match="bodies that are arriving fill the"):
                second(1)
        with reader.receiving() as third:  # what was refused is gone
            third(400)
    with reader.receiving() as alone:  # one body alone has the limit of a body
        alone(5000)
    assert reader._arriving_bytes == 0
    reader.close()


def test_what_a_connection_has_sent_of_its_body_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "UNREAD_BYTES", 1000)
    reader = Reader(Settings(), SteppedEngine(Limits()))

    async def sent() -> None:
        slow = asyncio.Event()

        def exchange(*chunks: bytes, stops: bool) -> Exchange:
            waiting = [*chunks]

            async def receive() -> Any:
                if not waiting and stops:
                    await slow.wait()
                chunk = waiting.pop(0) if waiting else b""
                return {"type": "http.request", "body": chunk, "more_body": bool(waiting) or stops}

            made = Exchange()
            made.headers, made.receive = {}, receive
            return made

        first = asyncio.create_task(read_body(exchange(b"x" * 600, stops=True), reader))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await read_body(exchange(b"x" * 300, b"x" * 300, stops=False), reader)
        first.cancel()
        await asyncio.wait([first])
        assert len(await read_body(exchange(b"x" * 300, b"x" * 300, stops=False), reader)) == 600

    asyncio.run(sent())
    reader.close()


@pytest.mark.parametrize(("size", "on_loop"), [(2**15, True), (2**22, False)])
def test_a_small_body_that_unpacks_to_a_large_one_leaves_the_event_loop_alone(
    monkeypatch: pytest.MonkeyPatch, size: int, on_loop: bool
) -> None:
    unpack, threads = body._unpacked, []

    def noted(*given: Any) -> bytes:
        unpacked = unpack(*given)
        threads.append(threading.current_thread())
        return unpacked

    monkeypatch.setattr(body, "_unpacked", noted)
    reader = Reader(Settings(max_body_bytes=2**22), SteppedEngine(Limits()))

    packed = [gzip.compress(b" " * size)]

    async def receive() -> Any:
        if not packed:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": packed.pop()}

    async def read() -> bytes:
        exchange = Exchange()
        exchange.headers, exchange.receive = {b"content-encoding": b"gzip"}, receive
        return await read_body(exchange, reader)

    assert len(asyncio.run(read())) == size
    assert [one is threading.main_thread() for one in threads] == [on_loop]
    reader.close()
