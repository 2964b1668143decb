"""Answers that are there as a whole leave in one piece, bodies are taken in one, and nothing slips
into heads."""

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve.whole_answer import write_whole
from serve.whole_body import whole_body


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def cycle_on(wire: Wire, *, keep_alive: bool = True) -> RequestResponseCycle:
    return RequestResponseCycle(
        scope={"type": "http"},  # type: ignore[typeddict-item]  # the rest is not looked at
        transport=wire,
        flow=FlowControl(wire),
        logger=logging.getLogger(),
        access_logger=logging.getLogger(),
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


def test_head_and_body_are_one_piece() -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    assert write_whole(
        cycle, cycle.flow, 200, [(b"content-length", b"2")], ((b"x-a", b"b"),), b"{}"
    )
    assert wire.written == [
        b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\nx-a: b\r\n\r\n{}",
    ]
    assert cycle.response_complete and cycle.message_event.is_set() and not wire.closed


def test_a_connection_that_does_not_stay_is_closed_and_told_so() -> None:
    wire = Wire()
    cycle = cycle_on(wire, keep_alive=False)
    assert write_whole(cycle, cycle.flow, 404, (), (), b"")
    assert wire.written[0].startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert b"\r\nconnection: close\r\n" in wire.written[0] and wire.closed


@pytest.mark.parametrize("state", ["disconnected", "response_started"])
def test_nothing_is_written_where_it_cannot_be(state: str) -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    setattr(cycle, state, True)
    assert not write_whole(cycle, cycle.flow, 200, (), (), b"{}")
    assert not wire.written


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_a_header_of_several_lines_is_never_written(value: bytes) -> None:
    wire = Wire()
    cycle = cycle_on(wire)
    with pytest.raises(RuntimeError):
        write_whole(cycle, cycle.flow, 200, [(b"x-name", value)], (), b"")
    assert not wire.written


def test_a_whole_body_is_taken_once() -> None:
    cycle = cycle_on(Wire())
    cycle.body += b"{}"
    cycle.message_event.set()
    assert whole_body(cycle, cycle.flow) == b"{}"
    assert cycle.body == b"" and not cycle.message_event.is_set()


@pytest.mark.parametrize("state", ["disconnected", "response_complete"])
def test_nobody_reads_the_body_of_a_client_that_has_left(state: str) -> None:
    cycle = cycle_on(Wire())
    cycle.body += b"{}"
    setattr(cycle, state, True)
    assert whole_body(cycle, cycle.flow) is None
