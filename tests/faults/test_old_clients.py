"""Clients of HTTP/1.0, and those that close the half of the connection that they send on."""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.fake_server import FakeServer, fake_server
from tests.faults.raw_http import get, until_closed

STREAM = {"prompt": "abc", "max_tokens": 5, "stream": True, "steps": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def post(path: str, body: object, version: str, *headers: str) -> bytes:
    content = json.dumps(body)
    lines = [f"POST {path} HTTP/{version}", f"content-length: {len(content)}", "host: t", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + content).encode()


def answer(server: FakeServer, request: bytes, half: bool = False) -> tuple[list[bytes], bytes]:
    """The lines of the head in small letters, and the body; the server must close by itself."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        if half:
            connection.shutdown(socket.SHUT_WR)
        head, _, body = until_closed(connection, within_s=10).partition(b"\r\n\r\n")
    return head.lower().split(b"\r\n"), body


@pytest.mark.parametrize("headers", [(), ("connection: keep-alive",)])
def test_a_stream_of_http_1_0_is_not_in_chunks_and_ends_with_the_connection(
    server: FakeServer, headers: tuple[str, ...]
) -> None:
    head, body = answer(server, post("/v1/generate", STREAM, "1.0", *headers))
    assert head[0] == b"http/1.1 200 ok"
    assert b"connection: close" in head
    assert not [line for line in head if line.startswith((b"transfer-encoding", b"content-length"))]
    *tokens, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert [json.loads(token.removeprefix(b"data: "))["text"] for token in tokens] == [*"defgh"]
    assert done.startswith(b"event: done\ndata: {")


def test_a_stream_of_http_1_1_goes_on_being_in_chunks(server: FakeServer) -> None:
    head, body = answer(server, post("/v1/generate", STREAM, "1.1", "connection: close"))
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"\r\n0\r\n\r\n")


def test_http_1_0_is_never_told_to_continue(server: FakeServer) -> None:
    asked = post("/v1/classify", {"input": "x"}, "1.0", "expect: 100-continue")
    head, body = answer(server, asked)
    assert head[0] == b"http/1.1 200 ok"
    assert json.loads(body)["results"]


@pytest.mark.parametrize("path", ["/health/ready", "/metrics", "/v1/models", "/docs"])
def test_what_is_looked_up_is_answered_to_a_half_closed_connection(
    server: FakeServer, path: str
) -> None:
    head, body = answer(server, get("/health/live") + get(path), half=True)
    assert head[0] == b"http/1.1 200 ok"
    assert body.count(b"HTTP/1.1 200 OK") == 1
    assert body.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("stream", [True, False])
def test_no_model_works_for_a_half_closed_connection(server: FakeServer, stream: bool) -> None:
    cancelled = server.metric("stepdial_cancelled_total")
    server.mood.gate.clear()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(post("/v1/generate", STREAM | {"stream": stream}, "1.1"))
            server.wait_for(running=1)
            connection.shutdown(socket.SHUT_WR)
            assert until_closed(connection, within_s=10) == b""
            server.wait_for(running=0)
    finally:
        server.mood.gate.set()
    assert server.metric("stepdial_cancelled_total") == cancelled + 1
