"""What follows a chunked body, and what stands between its chunks: bounded, and never headers."""

import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from serve.keys import NewKey
from tests.faults.raw_http import GOOD, exchange, get, head, one_answer, status
from tests.fixtures.tiny_folders import classify_bundle
from tests.server_process import ServerProcess, server_process

CHUNKED = "transfer-encoding: chunked"
PLENTY = 50 * 2**20
# A server that keeps what it is sent takes several times as much.
ROOM_KIB = 16 * 1024


@pytest.fixture(scope="module")
def key() -> NewKey:
    return NewKey.draw("somebody")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key: NewKey) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(key.block)
    path.chmod(0o600)
    with server_process(
        [classify_bundle().folder], "--api-keys-file", str(path), cold=True
    ) as running:
        yield running
        metrics = httpx.get(f"{running.url}/metrics", headers={"x-api-key": key.secret}).text
        assert 'code="500"' not in metrics and "stepdial_in_flight 0.0" in metrics


def chunked(*trailers: str, body: bytes = GOOD) -> bytes:
    ends = "".join(f"{trailer}\r\n" for trailer in trailers).encode()
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, ends)


@pytest.mark.parametrize(
    ("path", "first", "piece"),
    [
        ("/health", b"0\r\n", b"".join(b"a%06x: b\r\n" % number for number in range(5000))),
        ("/v1/classify", b"0\r\n", b"".join(b"a%06x: b\r\n" % number for number in range(5000))),
        ("/health", b"0\r\nx: ", b"y" * 2**17),
        ("/v1/classify", b"0\r\n", b"y" * 2**17),
        ("/v1/classify", b"1;x=", b"y" * 2**17),
    ],
    ids=["many", "many of a route that reads", "a value", "a name", "a chunk's extension"],
)
def test_what_never_ends_is_cut_and_not_kept(
    server: ServerProcess, key: NewKey, path: str, first: bytes, piece: bytes
) -> None:
    sent, began_s = 0, time.monotonic()
    before_kib = server.memory_kib()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head(None, CHUNKED, f"x-api-key: {key.secret}", path=path) + first)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while sent < PLENTY:
                sent += connection.send(piece)
    # What the system takes on the way counts as sent.
    assert sent < PLENTY / 4 and time.monotonic() - began_s < 10
    assert server.memory_kib("VmHWM") - before_kib < ROOM_KIB
    assert httpx.get(f"{server.url}/health/live").status_code == 200


def test_a_trailer_is_no_header(server: ServerProcess, key: NewKey) -> None:
    own = f"x-api-key: {key.secret}"
    for trailer in (own, f"authorization: Bearer {key.secret}"):
        sent = head(None, CHUNKED) + chunked(trailer)
        assert status(exchange(server, sent)) == 401
    for trailer in ("x-request-id: forged", "origin: http://evil.example", "host: evil.example"):
        received = exchange(server, head(None, CHUNKED, own) + chunked(trailer))
        assert status(received) == 200 and b"forged" not in received
    received = exchange(server, head(None, CHUNKED, own, "x-request-id: mine") + chunked("a: b"))
    assert b"x-request-id: mine\r\n" in received


def test_trailers_within_the_limits_leave_the_connection_open(
    server: ServerProcess, key: NewKey
) -> None:
    asked = head(None, CHUNKED, f"x-api-key: {key.secret}")
    trailers = [f"x-{number}: {'y' * 200}" for number in range(90)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        for _ in range(3):
            connection.sendall(asked + chunked(*trailers))
            assert status(one_answer(connection)) == 200
        connection.sendall(asked + chunked(*trailers) + get("/health/live"))
        assert status(one_answer(connection)) == 200


@pytest.mark.parametrize("number", [1, 100_000])
def test_a_body_of_many_chunks_of_a_byte_each_is_a_body(
    server: ServerProcess, key: NewKey, number: int
) -> None:
    body = GOOD + b" " * number
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sent = head(None, CHUNKED, f"x-api-key: {key.secret}") + pieces
    assert status(exchange(server, sent, wait_s=20)) == 200
