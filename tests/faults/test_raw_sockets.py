"""Bytes that no client library would send: never a 5xx, and the server goes on."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.connection import LimitedProtocol
from tests.faults.raw_http import (
    GOOD,
    complete,
    divided,
    error_code,
    exchange,
    get,
    head,
    one_answer,
    status,
    until_closed,
)
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders, "--body-timeout-s", "0.5", "--max-body-bytes", "65536") as running:
        yield running
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'code="500"' not in metrics
        assert "stepdial_in_flight 0.0" in metrics


@pytest.fixture(autouse=True)
def survives(server: ServerProcess) -> Iterator[None]:
    yield
    answer = httpx.post(f"{server.url}/v1/classify", json={"input": "still here"}, timeout=10)
    assert answer.status_code == 200


def test_a_body_that_never_comes(server: ServerProcess) -> None:
    began_s = time.monotonic()
    received = exchange(server, head(100), b'{"input": ')
    assert (status(received), error_code(received)) == (408, "request_timeout")
    assert 0.4 < time.monotonic() - began_s < 3
    assert b"connection: close" in received.lower()


@pytest.mark.parametrize("length", [2**31, 2**63, 2**70, 10**30])
def test_a_huge_length_is_refused_before_the_body(server: ServerProcess, length: int) -> None:
    received = exchange(server, head(length))
    assert status(received) in (400, 413)


def test_a_body_that_grows_beyond_the_limit(server: ServerProcess) -> None:
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    received = exchange(server, head(None, "transfer-encoding: chunked"), *[chunk] * 50)
    # The server closes while bytes are still coming, so its answer may be lost on the way.
    assert received == b"" or status(received) == 413


@pytest.mark.parametrize(
    ("bytes_sent", "expected"),
    [
        (b"\r\n\r\n\r\n", None),  # a request may yet come
        (b"GET\r\n\r\n", 400),
        (b"\x00" * 100, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x01" * 50, 400),
        (b"POST /v1/classify HTTP/9.9\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (head("-1"), 400),
        (head("ten"), 400),
        (head("1, 2"), 400),
        (head(5, "content-length: 6") + b"12345", 400),
        (head(5, "transfer-encoding: chunked") + b"zz\r\n", 400),
        (head(None, "transfer-encoding: chunked") + b"fffffffffffffffff\r\n", 400),
        (head(14, "bad header") + GOOD, 400),
        (head(14, "x: \x00") + GOOD, 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /%zz%00%ff HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET //v1//models HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET http://elsewhere/v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /v1/models/" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (head(14, *[f"x-{number}: {'y' * 100}" for number in range(500)]) + GOOD, 431),
        (head(14, "x-request-id: \xff\xfe") + GOOD, 200),
        (head(14, "expect: 100-continue") + GOOD, 200),
        (head(14, "connection: upgrade", "upgrade: websocket") + GOOD, 200),
    ],
    ids=lambda sent: repr(sent[:24]) if isinstance(sent, bytes) else None,
)
def test_strange_requests_get_no_5xx(
    server: ServerProcess, bytes_sent: bytes, expected: int | None
) -> None:
    received = exchange(server, bytes_sent, wait_s=5 if expected else 1)
    if not received:  # while bytes are still coming, what the server wrote may be lost on the way
        assert expected is None or len(bytes_sent) > 10_000
    else:
        assert status(received) == expected


@pytest.mark.parametrize("coding", ["gzip, chunked", "banana", "gzip", "identity, chunked"])
def test_a_body_in_another_coding_is_a_501(server: ServerProcess, coding: str) -> None:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    received = exchange(server, head(None, f"transfer-encoding: {coding}") + body)
    assert (status(received), error_code(received)) == (501, "unsupported_coding")
    twice = ("transfer-encoding: gzip", "transfer-encoding: chunked")
    assert status(exchange(server, head(None, *twice) + body)) == 501
    plain = exchange(server, head(None, "Transfer-Encoding: Chunked") + body)
    assert status(plain) == 200


# Java's HttpClient and `curl --http2` offer HTTP/2 with every first request of a connection.
_OFFERS = [
    ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAB"),
    ("connection: upgrade", "upgrade: websocket"),
]


@pytest.mark.parametrize("offer", _OFFERS, ids=["h2c", "websocket"])
@pytest.mark.parametrize("parted", [False, True], ids=["whole", "parted"])
def test_an_offer_of_another_protocol_is_ignored(
    server: ServerProcess, offer: tuple[str, ...], parted: bool
) -> None:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    sent = [
        head(len(GOOD), *offer) + GOOD,
        head(None, *offer, "transfer-encoding: chunked") + chunks,
        get("/health/ready", *offer),
        get("/health/ready", "connection: close"),
    ]
    pieces = [b"".join(sent)]
    if parted:  # within heads and bodies
        pieces = [pieces[0][start : start + 50] for start in range(0, len(pieces[0]), 50)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.005 * parted)
        received = until_closed(connection, 5)
    assert received.count(b"HTTP/1.1 200") == 4, received
    assert received.count(b'"results"') == received.count(b'"ready"') == 2


def test_a_body_behind_an_offer_is_limited(server: ServerProcess) -> None:
    large = head(2**30, *_OFFERS[0])
    assert status(exchange(server, large)) == 413
    assert status(exchange(server, head(1000, *_OFFERS[0]), GOOD)) == 408


def test_time_counts_from_when_a_request_came_not_from_when_its_turn_came(
    server: ServerProcess,
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 100, "seed": 1}).encode()
    one = head(len(body), path="/v1/generate") + body
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(one * 2)  # the second waits until the first has been answered
        first, rest = divided(one_answer(connection))
        second = rest if complete(rest) else rest + one_answer(connection)
    spent_ms = [
        json.loads(answer.partition(b"\r\n\r\n")[2])["timing"] for answer in (first, second)
    ]
    assert spent_ms[1]["total_ms"] > spent_ms[0]["total_ms"] + 0.5 * spent_ms[1]["compute_ms"]


def test_a_connection_whose_next_request_has_come_is_not_closed_to_make_room() -> None:
    client, opened = socket.socketpair()

    class Transport:
        def get_write_buffer_size(self) -> int:
            return 0

        def get_extra_info(self, name: str) -> socket.socket:
            return opened

    connection: Any = object.__new__(LimitedProtocol)
    connection.transport = Transport()
    assert connection.may_go()
    client.sendall(get("/health"))  # which nobody has read yet
    assert not connection.may_go()
    opened.recv(65536)
    assert connection.may_go()
    opened.close()
    client.close()
    assert connection.may_go()
