"""Inputs that have yet to be read wait in the one queue: counted, limited, dropped at deadlines."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serve.inputs.text import Encoded, TextCodec
from tests.fake_server import FakeServer, fake_server

LONG = "a good film " * 400  # too long to be encoded on the event loop
QUEUE = 3


class Slow:
    """Holds up the encoding of long texts, or slows it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = 0.0
        self.read = 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found, encode = Slow(), TextCodec.encode_input

    def encode_slowly(self: TextCodec, text: str, truncate: bool, param: str = "input") -> Encoded:
        if text == LONG:
            assert found.gate.wait(20)
            time.sleep(found.seconds)
            found.read += 1
        return encode(self, text, truncate, param)

    monkeypatch.setattr(TextCodec, "encode_input", encode_slowly)
    yield found
    found.gate.set()


@pytest.fixture
def server(slow: Slow) -> Iterator[FakeServer]:
    with fake_server(queue_limit=QUEUE) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def ask(server: FakeServer, **fields: Any) -> httpx.Response:
    body = {"model": "tiny-classify", "input": LONG} | fields
    return httpx.post(f"{server.url}/v1/classify", json=body, timeout=30)


def hold(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor, waiting: int
) -> "list[Future[httpx.Response]]":
    """One request whose input is being read, and so many behind it."""
    slow.gate.clear()
    sent = [pool.submit(ask, server) for _ in range(waiting + 1)]
    server.wait_for(running=1, queued=waiting)
    return sent


def test_who_waits_to_be_read_is_counted(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    sent = hold(server, slow, pool, 2)
    text = httpx.get(f"{server.url}/metrics").text
    assert "stepdial_queue_depth 2.0\n" in text and "stepdial_in_flight 1.0\n" in text
    slow.gate.set()
    assert [one.result().status_code for one in sent] == [200] * 3
    server.wait_for(running=0, queued=0)


def test_the_queue_is_full_whatever_it_waits_for(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    sent = hold(server, slow, pool, QUEUE)
    for body in ({}, {"input": "short"}):  # the second needs no reading, but a place
        response = ask(server, **body)
        assert response.status_code == 429, response.text
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    slow.gate.set()
    assert [one.result().status_code for one in sent] == [200] * (QUEUE + 1)


def test_a_deadline_counts_while_an_input_waits_to_be_read(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    sent = hold(server, slow, pool, 1)
    began_s = time.monotonic()
    response = ask(server, deadline_ms=300)
    assert time.monotonic() - began_s < 3
    assert response.status_code == 504, response.text
    assert response.json()["error"]["code"] == "deadline_lapsed"
    server.wait_for(running=1, queued=1)  # it waits no more
    labels = {"model": "tiny-classify"}
    assert server.metric("stepdial_deadlines_total", **labels) == 1
    assert server.metric("stepdial_lapsed_total", **labels) == 1
    slow.gate.set()
    assert [one.result().status_code for one in sent] == [200] * 2
    assert slow.read == 2  # not that of the one that was dropped


def test_a_deadline_counts_while_its_own_input_is_read(server: FakeServer, slow: Slow) -> None:
    slow.seconds = 1.0
    response = ask(server, deadline_ms=300)
    # Nothing else is to blame, and an idle server would not be quicker; it does not say how quick.
    assert response.status_code == 504, response.text
    assert "idle" not in response.text


@pytest.mark.long
def test_behind_slow_inputs_a_deadline_is_refused_at_once(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    slow.seconds = 0.5
    for _ in range(8):  # by then it is known how long they take
        assert ask(server).status_code == 200
    sent = hold(server, slow, pool, 2)
    began_s = time.monotonic()
    response = ask(server, deadline_ms=500)
    assert time.monotonic() - began_s < 0.4
    assert response.status_code == 429, response.text
    assert response.json()["error"]["code"] == "too_busy"
    assert int(response.headers["retry-after-ms"]) > 100
    slow.gate.set()
    assert [one.result().status_code for one in sent] == [200] * 3


def test_who_leaves_while_waiting_to_be_read_is_dropped(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    sent = hold(server, slow, pool, 1)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/classify",
            json={"model": "tiny-classify", "input": LONG},
            timeout=httpx.Timeout(10, read=0.3),
        )
    server.wait_for(running=1, queued=1)
    assert server.metric("stepdial_cancelled_total") == 1
    slow.gate.set()
    assert [one.result().status_code for one in sent] == [200] * 2
    server.wait_for(running=0, queued=0)
    assert slow.read == 2


def test_large_bodies_that_wait_to_be_checked_are_in_the_queue(
    server: FakeServer, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    from serve.api import body as wire

    check = wire._check_parts

    def check_slowly(body: bytes) -> None:
        if len(body) > 100_000:
            assert gate.wait(20)
        check(body)

    monkeypatch.setattr(wire, "_check_parts", check_slowly)
    large = "x" * 200_000
    sent = [pool.submit(ask, server, input=large) for _ in range(QUEUE + 1)]
    server.wait_for(running=1, queued=QUEUE)
    assert ask(server, input=large).json()["error"]["code"] == "queue_full"
    gate.set()
    assert {one.result().status_code for one in sent} == {200}


def test_a_slow_upload_is_not_taken_for_slow_work(server: FakeServer) -> None:
    content = b'{"model": "tiny-classify", "input": "x", "deadline_ms": 300, "steps": 4}'

    def slowly() -> Iterator[bytes]:
        yield content[:10]
        time.sleep(0.6)
        yield content[10:]

    response = httpx.post(f"{server.url}/v1/classify", content=slowly(), timeout=30)
    assert response.status_code == 504, response.text
    assert "idle" not in response.text
