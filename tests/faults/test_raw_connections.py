"""Connections used as no client library would: too many, unread, closed by half, sent ahead."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.faults.raw_http import GOOD, error_code, exchange, get, head, status, until_closed
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import START_S, ServerProcess, server_process
from tests.waiting import wait_until

CONNECTIONS = 8
SEND_TIMEOUT_S = 1.0
TOKENS = 100_000  # far more than any machine makes before the timeout
LAST = "connection: close"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    flags = ["--max-connections", str(CONNECTIONS), "--send-timeout-s", str(SEND_TIMEOUT_S)]
    flags += ["--header-timeout-s", "5", "--max-tokens", str(TOKENS)]
    with server_process(folders, *flags, cold=True) as running:
        yield running
        assert 'code="500"' not in httpx.get(f"{running.url}/metrics").text


@pytest.fixture(autouse=True)
def survives(server: ServerProcess) -> Iterator[None]:
    yield
    wait_for(server, "stepdial_in_flight 0.0")
    answer = httpx.post(f"{server.url}/v1/classify", json={"input": "still here"}, timeout=10)
    assert answer.status_code == 200


def wait_for(server: ServerProcess, line: str) -> None:
    wait_until(lambda: line in httpx.get(f"{server.url}/metrics").text, f"no {line}", START_S)


def connect(server: ServerProcess, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:  # before it connects, so that the window is as small
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    return connection


def generate(max_tokens: int, **fields: object) -> bytes:
    body = json.dumps({"prompt": "To be", "max_tokens": max_tokens, **fields}).encode()
    return head(len(body), path="/v1/generate") + body


def test_connections_beyond_the_limit_get_503_but_probes_are_answered(
    server: ServerProcess,
) -> None:
    with ExitStack() as held:
        # Requests that have begun make room for nobody.
        for _ in range(CONNECTIONS):
            held.enter_context(connect(server)).sendall(head(len(GOOD)) + GOOD[:-1])
        server.wait_until_it_has_read()
        received = exchange(server, head(len(GOOD)) + GOOD)
        assert (status(received), error_code(received)) == (503, "too_many_connections")
        assert b"retry-after: 1\r\n" in received and b"connection: close\r\n" in received
        for path in ("/health/live", "/health/ready"):
            assert status(exchange(server, get(path))) == 200
        for _ in range(70):
            held.enter_context(connect(server))
        server.wait_until_it_has_read()
        assert status(exchange(server, get("/health/live"))) == 200  # one that is idle went
    wait_for(server, 'stepdial_rejected_total{reason="too_many_connections"}')


def test_what_follows_a_request_does_not_spoil_its_answer(server: ServerProcess) -> None:
    no_chunk = head(None, "transfer-encoding: chunked") + b"no size\r\n"
    for garbage in (b"garbage garbage\r\n\r\n", b"\x00\xff", b"GET / HTTP/9\r\n\r\n", no_chunk):
        with connect(server) as connection:
            connection.sendall(head(len(GOOD)) + GOOD + generate(20, stream=True) + garbage)
            received = until_closed(connection, 5)
        assert received.count(b"HTTP/1.1 200 OK") == 2 and b"HTTP/1.1 400" not in received
        assert received.count(b"event: done") == 1
        assert received.endswith(b"0\r\n\r\n")


def test_requests_sent_ahead_are_answered_in_order_up_to_a_limit(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(head(len(GOOD)) + GOOD + get("/health/live") * 40)
        connection.sendall(get("/health/ready", LAST))
        received = until_closed(connection, 5)
    assert received.count(b"HTTP/1.1 200 OK") == 42
    assert received.index(b'"results"') < received.index(b'"live"')
    assert received.rindex(b'"live"') < received.index(b'"ready"')
    with connect(server) as connection:
        connection.sendall(get("/health/live") * 5000)
        received = until_closed(connection, 5)
    assert 64 <= received.count(b"HTTP/1.1 200 OK") < 1000


def test_a_generation_sent_before_others_ends_with_its_client(server: ServerProcess) -> None:
    before = cancelled(server)
    with connect(server) as connection:
        connection.sendall(generate(4000, stream=True) + get("/health/live") * 3)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_for(server, "stepdial_in_flight 1.0")
    wait_for(server, f"stepdial_cancelled_total {before + 1}")


def test_a_half_closed_connection_ends_its_generation(server: ServerProcess) -> None:
    before = cancelled(server)
    with connect(server) as connection:
        connection.sendall(generate(4000, stream=True))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.shutdown(socket.SHUT_WR)
        wait_for(server, f"stepdial_cancelled_total {before + 1}")


def cancelled(server: ServerProcess) -> float:
    found = re.search("\nstepdial_cancelled_total (.*)", httpx.get(f"{server.url}/metrics").text)
    assert found is not None
    return float(found[1])


def test_a_client_that_never_reads_holds_little_memory_and_is_cut_off(
    server: ServerProcess,
) -> None:
    """What is sent to it fills what the system holds for it, then what the server does."""
    page_kib = len(httpx.get(f"{server.url}/docs").content) / 1024
    before_kib = server.memory_kib()
    with ExitStack() as held:
        deaf = [held.enter_context(connect(server, 4096)) for _ in range(5)]
        for connection in deaf:
            connection.sendall(get("/docs") * 60)
        time.sleep(SEND_TIMEOUT_S / 2)
        assert server.memory_kib() - before_kib < 5 * (64 + 4 * page_kib) + 4096
        time.sleep(SEND_TIMEOUT_S)
        for connection in deaf:
            assert was_cut_off(connection)


def test_a_stream_that_nobody_reads_is_cut_off_and_its_work_ends(server: ServerProcess) -> None:
    before = cancelled(server)
    with connect(server, 4096) as connection:
        connection.sendall(generate(TOKENS, stream=True))
        wait_for(server, f"stepdial_cancelled_total {before + 1}")
        assert was_cut_off(connection)


def was_cut_off(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False
