"""Bodies that are still arriving: together they have a limit, as those that wait have."""

import asyncio
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
