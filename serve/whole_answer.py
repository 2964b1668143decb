"""Writes an answer that is there as a whole in one piece: its head and its body together.

uvicorn writes the two one after the other, which takes a system call and a packet more, and looks
through every header that the server itself made. Knows uvicorn's state of a request; deliberately
neither applications nor what answers say.
"""

import json
from collections.abc import Sequence
from functools import lru_cache

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from serve.errors import ServeError
from serve.wire.envelope import SECURITY_HEADERS
from serve.wire.error_shapes import error_body
from serve.wire.origin import Header, HeaderList


def write_whole(
    cycle: RequestResponseCycle,
    flow: FlowControl,
    status: int,
    headers: Sequence[Header],
    always: HeaderList,
    body: bytes,
) -> bool:
    """Whether the answer was written; if not, it has to go its usual way.

    `always` are headers that other answers have as well.
    """
    if cycle.disconnected or cycle.response_started or flow.write_paused:
        return False
    head = _lines([*cycle.default_headers, *headers]) + _same_lines(always)
    if not cycle.keep_alive:
        head += b"connection: close\r\n"
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n", body)))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


def _lines(headers: Sequence[Header]) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") + lines.count(b"\r") > 2 * len(headers):
        raise RuntimeError("a header holds the end of a line")
    return lines


_same_lines = lru_cache(maxsize=8)(_lines)


def refusal(problem: ServeError, path: str) -> bytes:
    """A whole answer, for clients that no application ever hears of."""
    body = json.dumps(error_body(problem, path)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *SECURITY_HEADERS,
    ]
    headers += [
        (name.encode(), value.encode())
        for name, value in problem.headers().items()
        if name != "connection"
    ]
    lines = [name + b": " + value for name, value in headers]
    return STATUS_LINE[problem.status] + b"\r\n".join([*lines, b"", body])
