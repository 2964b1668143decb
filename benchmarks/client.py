"""A client that adds as little time of its own as Python can: one connection, kept open.

Knows HTTP, JSON and server-sent events; deliberately nothing of what is asked.
"""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.server import Server

TIMEOUT_S = 120.0


class UnexpectedAnswer(Exception):
    """The server answered, but not with what was asked for."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, and the time from asking to having read it."""

    body: dict[str, Any]
    wall_ms: float


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event, and when it came after the request was sent."""

    name: str  # empty for a token
    data: dict[str, Any]
    at_ms: float


class Client:
    """One connection to a server. Not for several threads."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    @classmethod
    def of(cls, server: Server) -> Self:
        return cls(server.host, server.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave, whatever is under way; the next request connects again."""
        self._connection.close()

    def get(self, path: str) -> str:
        """The text at a path."""
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise UnexpectedAnswer(f"{response.status} from {path}: {text[:300]}")
        return text

    def status(self, path: str) -> int:
        """The status at a path, whatever it is."""
        try:
            self._connection.request("GET", path)
            response = self._connection.getresponse()
            response.read()
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise ConnectionError(f"{path}: {error}") from error
        return response.status

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        """The answer to a JSON body; UnexpectedAnswer unless it is a 200."""
        payload = json.dumps(body).encode()
        begun_s = time.perf_counter()
        self._send(path, payload)
        response = self._connection.getresponse()
        answer = response.read()
        wall_ms = (time.perf_counter() - begun_s) * 1000
        _check(response, path, answer)
        return Reply(json.loads(answer), wall_ms)

    def send_only(self, path: str, body: dict[str, Any]) -> None:
        """Ask, without waiting for the answer; `close` then leaves the server with it."""
        self._send(path, json.dumps(body).encode())

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[StreamEvent]:
        """The events of an answer as they come; whoever stops before the end must `close`."""
        payload = json.dumps(body).encode()
        begun_s = time.perf_counter()
        self._send(path, payload)
        response = self._connection.getresponse()
        if response.status != 200:
            _check(response, path, response.read())
        name = ""
        # `read1` takes what has come: reading by lines would wait for, and count, more of them.
        pending = b""
        while True:
            piece = response.read1()
            if not piece:
                break
            at_ms = (time.perf_counter() - begun_s) * 1000
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                name, data = _parse(event)
                yield StreamEvent(name, data, at_ms)
        if pending or not name:
            raise UnexpectedAnswer(f"the stream of {path} broke off after {pending[-100:]!r}")

    def _send(self, path: str, payload: bytes) -> None:
        self._connection.request("POST", path, payload, {"content-type": "application/json"})


def _parse(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data = "", b""
    for line in event.split(b"\n"):
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data = value
    return name, json.loads(data)


def _check(response: http.client.HTTPResponse, path: str, answer: bytes) -> None:
    if response.status != 200:
        raise UnexpectedAnswer(f"{response.status} from {path}: {answer[:300]!r}")
