"""Requests as bytes on a socket, so that tests can send what no client library would.

Knows sockets and the first lines of HTTP; deliberately nothing of what the server answers.
"""

import json
import socket
import time

from tests.server_process import ServerProcess

GOOD = b'{"input": "x"}'


def head(length: int | str | None, *headers: str, path: str = "/v1/classify") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: test", *headers]
    if length is not None:
        lines.append(f"content-length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def exchange(
    server: ServerProcess, *pieces: bytes, pause_s: float = 0.0, wait_s: float = 5
) -> bytes:
    """Send these pieces and read until the server closes or nothing more comes."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait_s) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            while chunk := connection.recv(65536):
                received += chunk
                if complete(received):
                    break
        except (TimeoutError, ConnectionResetError):
            pass
    return received


def one_answer(connection: socket.socket) -> bytes:
    received = b""
    while not complete(received) and (chunk := connection.recv(65536)):
        received += chunk
    return received


def complete(received: bytes) -> bool:
    start, separator, body = received.partition(b"\r\n\r\n")
    for line in start.lower().split(b"\r\n"):
        if separator and line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False


def divided(received: bytes) -> tuple[bytes, bytes]:
    """The first answer, which is whole, and what came behind it."""
    start = received.partition(b"\r\n\r\n")[0]
    lengths = [line for line in start.lower().split(b"\r\n") if line.startswith(b"content-length")]
    end = len(start) + 4 + int(lengths[0].partition(b":")[2])
    return received[:end], received[end:]


def status(received: bytes) -> int:
    assert received.startswith(b"HTTP/1.1 "), received[:100]
    return int(received.split(b" ", 2)[1])


def error_code(received: bytes) -> str:
    return str(json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"])


def get(path: str, *headers: str) -> bytes:
    return ("\r\n".join([f"GET {path} HTTP/1.1", "host: test", *headers]) + "\r\n\r\n").encode()


def until_closed(connection: socket.socket, within_s: float) -> bytes:
    """All that still comes; AssertionError where the server does not close in time."""
    connection.settimeout(within_s)
    received, end_s = b"", time.monotonic() + within_s
    try:
        while chunk := connection.recv(65536):
            received += chunk
            assert time.monotonic() < end_s, "the server goes on sending"
    except ConnectionResetError:
        pass
    except TimeoutError:
        raise AssertionError(f"still open after {within_s} s; it sent {received!r}") from None
    return received
