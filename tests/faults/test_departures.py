"""Clients that leave: their work stops, and nothing of it stays."""

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.fake_server import FakeServer, fake_server
from tests.waiting import wait_until

STREAM = {"prompt": "abc", "max_tokens": 4000, "stream": True, "steps": 2}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def send(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """A request over a socket that the test holds, answered or not."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Leave without a farewell, as a process that is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def left_nothing(server: FakeServer) -> None:
    server.wait_for(running=0, queued=0)
    held = partial(server.metric, "stepdial_cache_bytes")
    wait_until(lambda: not (held() or server.mood.open_rows), "memory is not given back", 5)


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
def test_leaving_a_stream_stops_it_within_a_tick(server: FakeServer, leave: Any) -> None:
    connection = send(server.port, "/v1/generate", STREAM)
    assert connection.recv(1000)
    server.wait_for(running=1)
    leave(connection)
    left_nothing(server)
    calls = len(server.mood.calls)
    time.sleep(0.05)
    assert len(server.mood.calls) == calls
    assert server.metric("stepdial_cancelled_total") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token(server: FakeServer, stream: bool) -> None:
    server.mood.gate.clear()
    connection = send(server.port, "/v1/generate", STREAM | {"stream": stream})
    server.wait_for(running=1)
    connection.close()
    server.wait_for(running=0)
    server.mood.gate.set()
    left_nothing(server)
    assert server.metric("stepdial_cancelled_total") == 1


def test_leaving_the_queue(server: FakeServer) -> None:
    server.mood.gate.clear()
    first = send(server.port, "/v1/classify", {"input": "first"})
    server.wait_for(running=1)
    waiting = [send(server.port, "/v1/classify", {"input": "gone"}) for _ in range(5)]
    server.wait_for(running=1, queued=5)
    for connection in waiting:
        connection.close()
    server.wait_for(running=1, queued=0)
    server.mood.gate.set()
    assert first.recv(100).startswith(b"HTTP/1.1 200")
    first.close()
    assert len(server.mood.calls) == 1
    left_nothing(server)


def test_leaving_while_sending(server: FakeServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/classify HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert server.mood.calls == []
    left_nothing(server)


def test_those_who_stay_get_their_answers(server: FakeServer) -> None:
    server.mood.gate.clear()
    leavers = [send(server.port, "/v1/generate", STREAM) for _ in range(5)]
    results: list[httpx.Response] = []

    def stay() -> None:
        body = {"prompt": "abc", "max_tokens": 10, "temperature": 0, "steps": 2}
        results.append(httpx.post(f"{server.url}/v1/generate", json=body, timeout=20))

    stayers = [threading.Thread(target=stay) for _ in range(5)]
    for thread in stayers:
        thread.start()
    wait_until(lambda: server.engine.running + server.engine.queued == 10)
    server.mood.gate.set()
    for connection in leavers:
        connection.recv(100)
        connection.close()
    for thread in stayers:
        thread.join(20)
    assert [response.json()["text"] for response in results] == ["defghijklm"] * 5
    left_nothing(server)


def test_a_client_that_never_reads_holds_up_nobody(server: FakeServer) -> None:
    connection = send(server.port, "/v1/generate", STREAM)
    for _ in range(5):
        answer = httpx.post(f"{server.url}/v1/classify", json={"input": "x"}, timeout=5)
        assert answer.status_code == 200
    connection.close()
    left_nothing(server)


@pytest.mark.long
def test_hundreds_of_random_departures_leave_nothing(server: FakeServer) -> None:
    chance = random.Random(5)
    held: list[socket.socket] = []
    for number in range(300):
        body: dict[str, Any] = {"input": ["text"] * chance.randint(1, 5), "steps": 1}
        path = "/v1/classify"
        if chance.random() < 0.6:
            path = "/v1/generate"
            body = STREAM | {
                "max_tokens": chance.choice([1, 50, 1000]),
                "stream": chance.random() < 0.7,
                "steps": chance.choice([1, 2, 4]),
            }
        held.append(send(server.port, path, body))
        if chance.random() < 0.3:
            held[-1].recv(chance.randint(1, 2000))
        if len(held) > 20:
            leaver = held.pop(chance.randrange(len(held)))
            (reset if number % 2 else socket.socket.close)(leaver)
    for connection in held:
        connection.close()
    left_nothing(server)
    assert server.metric("stepdial_queue_depth") == server.metric("stepdial_in_flight") == 0
    answer = httpx.post(f"{server.url}/v1/classify", json={"input": "still here"})
    assert answer.status_code == 200


def test_a_connection_is_used_again_after_a_stream(server: FakeServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for _ in range(3):
        body = json.dumps(STREAM | {"max_tokens": 5})
        connection.request("POST", "/v1/generate", body)
        text = connection.getresponse().read().decode()
        assert text.count("event: done") == 1
    connection.close()
    left_nothing(server)
