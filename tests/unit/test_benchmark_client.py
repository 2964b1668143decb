"""The load generator of the benchmarks: what it loses would be taken for the server's fault."""

import asyncio
import gc
import http.server
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.client import Client, Crowd, Shot, UnexpectedAnswer, arrivals, fire, load
from benchmarks.server import Server

_IDLE_S = 0.2


class _Impatient(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S  # a connection on which nothing comes for so long is closed

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class _Patient(_Impatient):
    timeout = 30.0


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Server]:
    yield from _serving(_Impatient, tmp_path)


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Server]:
    yield from _serving(_Patient, tmp_path)


def _serving(handler: type[_Impatient], tmp_path: Path) -> Iterator[Server]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Server(0, "127.0.0.1", server.server_address[1], tmp_path / "log")
        finally:
            server.shutdown()
            thread.join()


def test_what_comes_after_the_server_has_closed_idle_connections_is_sent_anew(
    impatient: Server,
) -> None:
    shots = [Shot(due_s, {}) for due_s in (0.0, 3 * _IDLE_S, 3.1 * _IDLE_S, 6 * _IDLE_S)]
    fire(impatient, "/", shots, patience_s=5.0, connections=4)
    assert [shot.status for shot in shots] == [200] * 4


def test_a_connection_made_after_patience_has_run_out_is_not_left_open(
    impatient: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = asyncio.BaseEventLoop.create_connection

    async def late(loop: asyncio.BaseEventLoop, *given: Any, **named: Any) -> Any:
        await asyncio.sleep(0.12)
        return await at_once(loop, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "create_connection", late)
        shots = [Shot(0.0, {}) for _ in range(20)]
        fire(impatient, "/", shots, patience_s=0.1, connections=0)
    assert [shot.status for shot in shots] == [0] * 20
    gc.collect()  # what is collected unclosed fails the test


def test_where_nobody_listens_every_request_ends_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = Server(0, "127.0.0.1", free.getsockname()[1], tmp_path / "log")
        shots = [Shot(0.0, {}) for _ in range(3)]
        begun_s = time.monotonic()
        fire(nobody, "/", shots, patience_s=30.0, connections=0)
        assert time.monotonic() - begun_s < 10
    assert [shot.status for shot in shots] == [0] * 3


def test_a_closed_loop_counts_answers_and_errors_apart(impatient: Server) -> None:
    good = load(impatient, "/", [b"{}"], clients=3, seconds=0.3)
    assert good.answers == len(good.latencies_s) > 3 and good.errors == 0
    assert good.per_s == good.answers / good.seconds and good.seconds >= 0.3
    bad = load(impatient, "/broken", [b"{}"], clients=1, seconds=0.2)
    assert bad.answers == 0 < bad.errors


def test_arrivals_come_at_their_rate_and_in_time() -> None:
    due_s = [*arrivals(100.0, 20.0, random.Random(0))]
    assert due_s == sorted(due_s) and due_s[0] > 0 and due_s[-1] < 20
    assert len(due_s) == pytest.approx(2000, rel=0.1)
    assert due_s == [*arrivals(100.0, 20.0, random.Random(0))]


def post(client: Client, path: str = "/") -> str:
    client.post(path, {})
    return path


def test_a_crowd_asks_until_its_time_is_over_and_keeps_what_went_wrong(patient: Server) -> None:
    def broken(client: Client) -> str:
        return post(client, "/broken")

    with Crowd(patient, [post, post, broken], seconds=0.3) as crowd:
        pass
    assert set(crowd.kinds) == {"/"} and crowd.kinds.total() > 2
    assert all(0 <= one.due_s < 0.3 and one.latency_s > 0 for one in crowd.answered)
    assert len(crowd.errors) > 1
    assert all(isinstance(error, UnexpectedAnswer) for error in crowd.errors)


def test_a_crowd_asks_when_requests_are_due_and_each_once(patient: Server) -> None:
    due_s = [0.05 * number for number in range(8)]
    with Crowd(patient, [post] * 4, due=due_s) as crowd:
        pass
    assert sorted(one.due_s for one in crowd.answered) == due_s


def test_a_crowd_ends_when_it_is_told_to(patient: Server) -> None:
    def broken(client: Client) -> str:
        return post(client, "/broken")

    with Crowd(patient, [post] * 3, once=True) as once:
        pass
    assert once.kinds == {"/": 3}
    with Crowd(patient, [broken] * 3, until_error=True) as wrong:
        pass
    assert len(wrong.errors) == 3
    with Crowd(patient, [post]) as stopped:
        stopped.stop()
    assert not stopped.asking
