"""Inputs that have yet to be read wait in the one queue: counted, limited, dropped at deadlines."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest

from serve.api import body as wire
from serve.api import openai
from serve.inputs.text import Encoded, TextCodec
from tests.fake_server import FakeServer, fake_server
from tests.server_process import START_S

LONG = "a good film " * 400  # too long to be encoded on the event loop
QUEUE = 3


class Slow:
    """Holds up the encoding of long texts, or slows it."""

    def __init__(self) -> None:
        self.held = False
        self.turns = threading.Semaphore(0)  # of those that are held
        self.seconds = 0.0
        self.read = 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    found, encode = Slow(), TextCodec.encode_input

    def encode_slowly(self: TextCodec, text: str, truncate: bool, param: str = "input") -> Encoded:
        if text == LONG:
            assert not found.held or found.turns.acquire(timeout=START_S)
            time.sleep(found.seconds)
            found.read += 1
        return encode(self, text, truncate, param)

    monkeypatch.setattr(TextCodec, "encode_input", encode_slowly)
    yield found
    found.turns.release(9)


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
    return httpx.post(f"{server.url}/v1/classify", json=body, timeout=START_S)


def hold(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor, waiting: int
) -> "list[Future[httpx.Response]]":
    """One request whose input is being read, and so many behind it."""
    slow.held = True
    sent = [pool.submit(ask, server) for _ in range(waiting + 1)]
    server.wait_for(running=1, queued=waiting)
    return sent


def let_go(turns: threading.Semaphore, sent: "Sequence[Future[httpx.Response]]") -> None:
    """One after the other, and each is answered.

    If all went on at once, the last could find the others in the queue of the model, and it full.
    """
    left = set(sent)
    while left:
        turns.release()
        done, left = wait(left, return_when=FIRST_COMPLETED)
        assert {one.result().status_code for one in done} == {200}


def test_who_waits_to_be_read_is_counted(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    sent = hold(server, slow, pool, 2)
    text = httpx.get(f"{server.url}/metrics").text
    assert "stepdial_queue_depth 2.0\n" in text and "stepdial_in_flight 1.0\n" in text
    let_go(slow.turns, sent)
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
    let_go(slow.turns, sent)


def test_who_is_refused_is_told_how_long_the_others_will_be_read(
    server: FakeServer, slow: Slow, pool: ThreadPoolExecutor
) -> None:
    slow.seconds = 0.3
    assert ask(server).status_code == 200  # from now on it is known how long reading takes
    sent = hold(server, slow, pool, QUEUE)
    slow.seconds = 0.0
    reading_s = server.engine.unread.wait_s()
    assert reading_s > 0.2
    for body in ({}, {"input": "short"}):
        response = ask(server, **body)
        assert response.status_code == 429, response.text
        assert int(response.headers["retry-after-ms"]) >= 1000 * reading_s
    let_go(slow.turns, sent)


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
    let_go(slow.turns, sent)
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
    let_go(slow.turns, sent)


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
    let_go(slow.turns, sent)
    server.wait_for(running=0, queued=0)
    assert slow.read == 2


def test_large_bodies_that_wait_to_be_checked_are_in_the_queue(
    server: FakeServer, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, check = threading.Semaphore(0), wire._check_parts

    def check_slowly(body: bytes) -> None:
        if len(body) > 100_000:
            assert turns.acquire(timeout=START_S)
        check(body)

    monkeypatch.setattr(wire, "_check_parts", check_slowly)
    large = "x" * 200_000
    sent = [pool.submit(ask, server, input=large) for _ in range(QUEUE + 1)]
    server.wait_for(running=1, queued=QUEUE)
    assert ask(server, input=large).json()["error"]["code"] == "queue_full"
    let_go(turns, sent)


@pytest.mark.parametrize("field", ["content", "name"])
def test_long_chats_are_read_beside_the_event_loop(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    readers: list[str] = []

    def read(*_: Any) -> list[int]:
        readers.append(threading.current_thread().name)
        return [1]

    monkeypatch.setattr(openai, "read_chat", read)
    for text in ("a", "a" * (wire.LONG_CHARACTERS + 1)):
        message = {"role": "user", "content": "a"} | {field: text}
        asked = {"messages": [message], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=START_S)
        assert answer.status_code == 200, answer.text
    assert [name.startswith("read") for name in readers] == [False, True]


def test_a_slow_upload_is_not_taken_for_slow_work(server: FakeServer) -> None:
    content = b'{"model": "tiny-classify", "input": "x", "deadline_ms": 300, "steps": 4}'

    def slowly() -> Iterator[bytes]:
        yield content[:10]
        time.sleep(0.6)
        yield content[10:]

    response = httpx.post(f"{server.url}/v1/classify", content=slowly(), timeout=30)
    assert response.status_code == 504, response.text
    assert "idle" not in response.text
