"""SIGTERM under streaming load: who is told what, and when."""

import base64
import io
import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks import drains
from benchmarks.lab import Result
from tests.faults.raw_http import GOOD, error_code, head, until_closed
from tests.faults.raw_http import status as status_of
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, image_bundle
from tests.server_process import ServerProcess, server_process
from tests.sse import parse_events
from tests.waiting import wait_until

pytestmark = pytest.mark.long
FOLDERS = [classify_bundle().folder, generate_bundle().folder]
STREAMS = 6
READY_S = 0.1


class Streams:
    """Clients that read one stream each, on threads."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        self._url = f"{server.url}/v1/generate"
        self._max_tokens = max_tokens
        self._pool = ThreadPoolExecutor(STREAMS)
        self.begun: set[int] = set()
        self.ends: list[Future[tuple[int, str]]] = [
            self._pool.submit(self._read, number) for number in range(STREAMS)
        ]

    def wait(self, begun: int) -> None:
        wait_until(lambda: len(self.begun) >= begun, "the streams did not begin", 20)

    def _read(self, number: int) -> tuple[int, str]:
        body = {"prompt": "To be", "stream": True, "steps": 2, "seed": number}
        asked = body | {"max_tokens": self._max_tokens}
        text = ""
        with httpx.stream("POST", self._url, json=asked, timeout=60) as response:
            for piece in response.iter_text():
                if response.status_code == 200:
                    self.begun.add(number)
                text += piece
        return response.status_code, text


def watch_probes(server: ServerProcess, sent_s: float) -> float:
    """Ask until the server has gone; when readiness was asked last and still good."""
    last_good_s = 0.0
    with httpx.Client(base_url=server.url, timeout=5) as client:
        while True:
            asked_s = time.monotonic()
            try:
                ready = client.get("/health/ready").status_code
                live = client.get("/health/live").status_code
            except httpx.TransportError:
                return last_good_s
            assert ready in (200, 503) and live == 200
            if ready == 200:
                last_good_s = asked_s - sent_s
            time.sleep(0.002)


def test_streams_finish_while_readiness_is_off_and_liveness_on() -> None:
    with server_process(FOLDERS) as server:
        streams = Streams(server, 900)
        streams.wait(STREAMS)
        server.terminate()
        assert watch_probes(server, time.monotonic()) < READY_S
        for end in streams.ends:
            status, text = end.result()
            *tokens, (last, done) = parse_events(text)
            assert (status, last, len(tokens)) == (200, "done", 900)
            assert done["usage"]["completion_tokens"] == 900
            assert {name for name, _ in tokens} == {"message"}
        assert server.wait() == 0


def test_after_the_grace_limit_each_stream_ends_with_one_error() -> None:
    flags = ["--drain-s", "0.5", "--max-tokens", "1000000"]
    flags += ["--decode-rows", "4", "--queue-wait-s", "86400"]
    with server_process(FOLDERS, *flags) as server:
        streams = Streams(server, 1_000_000)
        streams.wait(4)  # the others wait for a place
        server.terminate()
        sent_s = time.monotonic()
        assert watch_probes(server, sent_s) < READY_S
        assert time.monotonic() - sent_s > 0.5
        ends = [end.result() for end in streams.ends]
        assert server.wait() == 0
    assert sorted(status for status, _ in ends) == [200, 200, 200, 200, 503, 503]
    for status, text in ends:
        if status == 503:
            assert '"code": "draining"' in text
            continue
        *tokens, (last, error) = parse_events(text)
        assert (last, error["error"]["code"]) == ("error", "draining") and tokens
        assert {name for name, _ in tokens} == {"message"}


def large_picture() -> str:
    """A file that takes a while to be read."""
    noise = np.random.default_rng(1).integers(0, 255, (8, 8), np.uint8)
    written = io.BytesIO()
    Image.fromarray(noise).resize((2500, 2500)).save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def begun(server: ServerProcess, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.sendall(sent)
    return connection


def test_a_request_that_is_still_arriving_gets_its_answer() -> None:
    sent = head(len(GOOD)) + GOOD
    cuts = (20, -len(GOOD), -1)  # in the head, before the body, in the body
    with ExitStack() as held:  # a server for each, which waits for nothing else
        servers = [held.enter_context(server_process(FOLDERS)) for _ in cuts]
        arriving = [
            held.enter_context(begun(server, sent[:cut]))
            for server, cut in zip(servers, cuts, strict=True)
        ]
        for server in servers:
            server.wait_until_it_has_read()
            server.terminate()
        for server in servers:
            while httpx.get(f"{server.url}/health/ready").status_code == 200:
                pass
            with begun(server, sent) as late:
                refused = until_closed(late, 5)
                assert (status_of(refused), error_code(refused)) == (503, "draining")
        time.sleep(2.5)  # longer than uvicorn would have waited
        for server, connection, cut in zip(servers, arriving, cuts, strict=True):
            connection.sendall(sent[cut:])
            assert status_of(until_closed(connection, 10)) == 200
            assert server.wait() == 0


def test_inputs_that_are_being_read_are_answered() -> None:
    picture = f"data:image/png;base64,{large_picture()}"
    body = json.dumps({"input": {"image": picture}}).encode()
    sent = head(len(body), "connection: close") + body
    with server_process([image_bundle().folder]) as server, ExitStack() as held:
        asked = [held.enter_context(begun(server, sent)) for _ in range(12)]
        server.wait_until_it_has_read()
        server.terminate()
        assert [status_of(until_closed(one, 60)) for one in asked] == [200] * 12
        assert server.wait(30) == 0
        assert "Traceback" not in server.rest_of_output()


def test_requests_that_come_later_do_not_keep_the_server() -> None:
    over = threading.Event()

    def look(server: ServerProcess) -> None:
        with httpx.Client(base_url=server.url, timeout=10) as client:
            while not over.is_set():
                try:
                    client.get("/v1/models")
                except httpx.TransportError:
                    return

    with server_process(FOLDERS) as server, ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(look, server)
        time.sleep(0.5)
        server.terminate()
        try:
            assert server.wait(10) == 0  # of the 30 s that it may take
        finally:
            over.set()


def test_a_request_that_begins_later_and_never_ends_does_not_keep_the_server() -> None:
    sent = head(len(GOOD)) + GOOD
    with server_process(FOLDERS) as server, begun(server, sent[:-1]) as early:
        server.wait_until_it_has_read()
        server.terminate()
        while httpx.get(f"{server.url}/health/ready").status_code == 200:
            pass
        with begun(server, sent[:20]):  # in the head
            server.wait_until_it_has_read()
            early.sendall(sent[-1:])
            assert status_of(until_closed(early, 10)) == 200
            assert server.wait(10) == 0  # of the 30 s that it may take


def test_what_is_left_after_the_grace_gets_its_error() -> None:
    sent = head(len(GOOD)) + GOOD
    with server_process(FOLDERS, "--drain-s", "0.5", "--access-log") as server:
        with begun(server, sent[:-1]) as body, begun(server, sent[:20]) as start:
            server.wait_until_it_has_read()
            server.terminate()
            sent_s = time.monotonic()
            for connection in (body, start):
                refused = until_closed(connection, 10)
                assert (status_of(refused), error_code(refused)) == (503, "draining")
            assert time.monotonic() - sent_s > 0.4
        assert server.wait() == 0
        said = server.rest_of_output()
    assert "Traceback" not in said and "ERROR" not in said, said
    assert "POST /v1/classify 503 " in said and said.count("error=draining") == 2


def test_a_second_signal_ends_the_grace() -> None:
    sent = head(len(GOOD)) + GOOD
    with server_process(FOLDERS) as server, begun(server, sent[:-1]) as connection:
        server.wait_until_it_has_read()
        server.terminate()
        wait_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        sent_s = time.monotonic()
        server.terminate()
        refused = until_closed(connection, 10)
        assert (status_of(refused), error_code(refused)) == (503, "draining")
        assert server.wait() == 0
        assert time.monotonic() - sent_s < 6


def test_nothing_is_loaded_any_more() -> None:
    key = "an-admin-key-of-some-length"
    flags = ("--max-tokens", "1000000", "--drain-s", "1")
    with server_process(FOLDERS, *flags, environment={"STEPDIAL_ADMIN_KEY": key}) as server:
        streams = Streams(server, 1_000_000)
        streams.wait(1)
        server.terminate()
        refused = httpx.post(
            f"{server.url}/admin/models",
            json={"bundle": str(Path(FOLDERS[0]))},
            headers={"authorization": f"Bearer {key}"},
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert server.wait() == 0


def test_signals_under_load_drop_nothing(tmp_path: Path) -> None:
    kept = ["--quick", "--results", str(tmp_path)]
    assert drains.main([*kept, "--bundles", str(FOLDERS[1])]) == 0
    result = Result.read(tmp_path / "drains.json")
    assert [target.what for target in result.targets if not target.met] == [], result.text
