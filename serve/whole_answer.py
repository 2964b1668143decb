"""Writes an answer that is there as a whole in one piece: its head and its body together.

uvicorn writes the two one after the other, which takes a system call and a packet more, and looks
through every header that the server itself made. Knows uvicorn's state of a request; deliberately
neither applications nor what answers say.
"""

import json

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from serve.errors import ServeError
from serve.wire.envelope import SECURITY_HEADERS
from serve.wire.error_shapes import error_body
from serve.wire.origin import HeaderList


def write_whole(
    cycle: RequestResponseCycle, flow: FlowControl, status: int, headers: HeaderList, body: bytes
) -> bool:
    """Whether the answer was written; if not, it has to go its usual way."""
    if cycle.disconnected or cycle.response_started or flow.write_paused:
        return False
    lines = [name + b": " + value for name, value in (*cycle.default_headers, *headers)]
    if not cycle.keep_alive:
        lines.append(b"connection: close")
    head = b"\r\n".join(lines)
    if head.count(b"\n") + head.count(b"\r") > 2 * len(lines) - 2:
        raise RuntimeError("a header holds the end of a line")
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join((STATUS_LINE[status], head, b"\r\n\r\n", body)))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


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
