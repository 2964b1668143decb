"""Takes a body that has come as a whole, without waiting for it.

Knows uvicorn's state of a request; deliberately neither applications nor what bodies say.
"""

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def whole_body(cycle: RequestResponseCycle, flow: FlowControl) -> bytes | None:
    """All of it; None if the client has left meanwhile."""
    if cycle.disconnected or cycle.response_complete:
        return None
    flow.resume_reading()
    cycle.message_event.clear()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body
