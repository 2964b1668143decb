"""Answers that are there as a whole leave in one piece, bodies are taken in one, nothing slips into
heads, and where there are too many connections those idle longest make room."""

import asyncio
import gc
import logging
import weakref
from ipaddress import ip_network
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from serve.connection import ConnectionTable, LimitedProtocol, limited
from serve.settings import Settings


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


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is asked")


def connection_on(wire: Wire, *, keep_alive: bool = True) -> LimitedProtocol:
    """A connection on which one request waits for its answer."""
    loop = asyncio.new_event_loop()
    loop.close()  # nothing is run
    made = limited(Settings(), 8, lambda code: None)(
        Config(app, log_config=None), ServerState(), {}, loop
    )
    made.flow = FlowControl(wire)
    made._answering = RequestResponseCycle(
        scope={"type": "http"},  # type: ignore[typeddict-item]  # the rest is not looked at
        transport=wire,
        flow=made.flow,
        logger=logging.getLogger(),
        access_logger=logging.getLogger(),
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )
    return made


def cycle_of(connection: LimitedProtocol) -> RequestResponseCycle:
    assert connection._answering is not None
    return connection._answering


def test_head_and_body_are_one_piece() -> None:
    wire = Wire()
    connection = connection_on(wire)
    assert connection.write_whole(200, [(b"content-length", b"2")], ((b"x-a", b"b"),), b"{}")
    assert wire.written == [
        b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\nx-a: b\r\n\r\n{}",
    ]
    cycle = cycle_of(connection)
    assert cycle.response_complete and cycle.message_event.is_set() and not wire.closed


def test_a_connection_that_does_not_stay_is_closed_and_told_so() -> None:
    wire = Wire()
    connection = connection_on(wire, keep_alive=False)
    assert connection.write_whole(404, (), (), b"")
    assert wire.written[0].startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert b"\r\nconnection: close\r\n" in wire.written[0] and wire.closed


@pytest.mark.parametrize("state", ["disconnected", "response_started"])
def test_nothing_is_written_where_it_cannot_be(state: str) -> None:
    wire = Wire()
    connection = connection_on(wire)
    setattr(cycle_of(connection), state, True)
    assert not connection.write_whole(200, (), (), b"{}")
    assert not wire.written


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_a_header_of_several_lines_is_never_written(value: bytes) -> None:
    wire = Wire()
    connection = connection_on(wire)
    with pytest.raises(RuntimeError):
        connection.write_whole(200, [(b"x-name", value)], (), b"")
    assert not wire.written


def test_a_whole_body_is_taken_once() -> None:
    connection = connection_on(Wire())
    cycle = cycle_of(connection)
    cycle.body += b"{}"
    cycle.message_event.set()
    assert connection.take_body() == b"{}"
    assert cycle.body == b"" and not cycle.message_event.is_set()


@pytest.mark.parametrize("state", ["disconnected", "response_complete"])
def test_nobody_reads_the_body_of_a_client_that_has_left(state: str) -> None:
    connection = connection_on(Wire())
    cycle_of(connection).body += b"{}"
    setattr(cycle_of(connection), state, True)
    assert connection.take_body() is None


def test_a_connection_that_was_reset_leaves_no_timer() -> None:
    async def reset() -> LimitedProtocol | None:
        loop = asyncio.get_running_loop()
        connection = limited(Settings(), 8, lambda code: None)(
            Config(app, log_config=None), ServerState(), {}, loop
        )
        connection.connection_made(Wire())
        connection._await_next_request()
        connection.connection_lost(ConnectionResetError())
        kept = weakref.ref(connection)
        del connection
        gc.collect()  # a connection and its parser refer to each other
        return kept()

    assert asyncio.run(reset()) is None


def test_a_lost_connection_is_freed_without_the_garbage_collector() -> None:
    async def until_it_is_lost(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def lost() -> LimitedProtocol | None:
        config = Config(until_it_is_lost, log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        connection = limited(Settings(), 8, lambda code: None)(config, ServerState(), {}, loop)
        connection.connection_made(Wire())
        connection.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
        await asyncio.sleep(0.01)
        connection.connection_lost(ConnectionResetError())
        kept = weakref.ref(connection)
        del connection
        await asyncio.sleep(0.01)
        return kept()

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(lost()) is None
    finally:
        gc.enable()


class Member:
    """A connection that may be closed for another."""

    def __init__(self) -> None:
        self.stays = False
        self.closed = False

    def may_go(self) -> bool:
        return not self.stays

    def make_room(self) -> None:
        self.closed = True


def test_who_has_been_idle_longest_makes_room() -> None:
    table = ConnectionTable(3, 3, ())
    working, first, second, third, fourth = (Member() for _ in range(5))
    assert all(table.enter(one, "10.0.0.1") for one in (working, first, second))
    table.busy(working)
    table.busy(first)
    table.idle(first)  # later than the second
    assert table.enter(third, "10.0.0.2") and second.closed
    first.stays = True  # it has not read its answer
    assert table.enter(fourth, "10.0.0.2") and third.closed
    assert not working.closed and not first.closed


def test_where_nobody_is_idle_the_newcomer_is_one_too_many() -> None:
    table = ConnectionTable(1, 1, ())
    working, newcomer = Member(), Member()
    table.enter(working, "10.0.0.1")
    table.busy(working)
    assert not table.enter(newcomer, "10.0.0.2") and table.spare == 1
    table.leave(newcomer)
    table.leave(newcomer)
    assert table.spare == 0
    table.leave(working)
    assert table.enter(Member(), "10.0.0.2")


def test_an_address_makes_room_for_itself() -> None:
    table = ConnectionTable(10, 2, [ip_network("10.9.0.0/16")])
    other, *greedy = (Member() for _ in range(4))
    assert table.enter(other, "10.0.0.2")
    assert [table.enter(one, "::ffff:10.0.0.1") for one in greedy] == [True] * 3
    assert greedy[0].closed and not other.closed
    for one in greedy[1:]:
        table.busy(one)
    assert not table.enter(Member(), "10.0.0.1")
    assert table.enter(Member(), "10.0.0.2")
    # Of a proxy, of a network of IPv6, and of no address at all.
    assert all(table.enter(Member(), "10.9.1.1") for _ in range(3))
    table = ConnectionTable(10, 1, ())
    same = [Member(), Member()]
    assert table.enter(same[0], "2001:db8::1") and table.enter(same[1], "2001:db8::ffff")
    assert same[0].closed
    assert table.enter(Member(), "2001:db8:0:1::1") and not same[1].closed
    assert all(table.enter(Member(), None) for _ in range(3))
