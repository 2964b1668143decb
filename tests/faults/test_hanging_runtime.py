"""The real server when a call of onnxruntime hangs: the call is ended, or else the process is."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.server import HUNG
from tests.fixtures.tiny_folders import generate_bundle
from tests.hanging_graphs import POISON, looping, pooling
from tests.server_process import ServerProcess, server_process
from tests.sse import parse_events
from tests.waiting import wait_until

READY = "/health/ready"


@contextmanager
def client_of(server: ServerProcess) -> Iterator[httpx.Client]:
    """Connected before anything is timed: a client takes up to 0.1 s to make."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get(READY).status_code == 200
        yield client


def classify(client: httpx.Client, text: str) -> httpx.Response:
    return client.post("/v1/classify", json={"input": text})


def seconds_until_not_ready(client: httpx.Client) -> float:
    begun_s = time.monotonic()
    wait_until(lambda: client.get(READY).status_code != 200, most_s=20)
    return time.monotonic() - begun_s


def failed(asked: "Future[httpx.Response]") -> dict[str, Any]:
    response = asked.result()
    assert response.status_code == 503, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == "model_failure"
    return error


@pytest.mark.long
def test_a_call_that_hangs_is_ended_and_the_server_goes_on(tmp_path: Path) -> None:
    folder = looping(tmp_path / "looping").folder
    with (
        server_process([folder], "--threads", "1") as server,
        client_of(server) as client,
        ThreadPoolExecutor() as pool,
    ):
        assert classify(client, "good").status_code == 200
        asked = pool.submit(classify, client, POISON)
        assert seconds_until_not_ready(client) < 2
        assert "try again" in failed(asked)["message"]
        wait_until(lambda: client.get(READY).status_code == 200)
        assert classify(client, "good").status_code == 200
        metrics = client.get("/metrics").text
        assert 'stepdial_late_calls_total{model="looping"} 1.0' in metrics
        assert 'stepdial_terminated_calls_total{model="looping"} 1.0' in metrics
        server.terminate()
        assert server.wait() == 0


@pytest.mark.long
def test_a_call_that_cannot_be_ended_ends_the_process(tmp_path: Path) -> None:
    folders = [pooling(tmp_path / "pooling").folder, generate_bundle().folder]
    flags = ("--stall-exit-s", "1", "--max-tokens", "1000000", "--threads", "1")
    with (
        server_process(folders, *flags) as server,
        client_of(server) as client,
        ThreadPoolExecutor() as pool,
    ):
        assert classify(client, "good").status_code == 200
        flowing = threading.Event()

        def stream() -> str:
            body = {"prompt": "a", "max_tokens": 1_000_000, "stream": True, "steps": 1}
            with client.stream("POST", "/v1/generate", json=body) as got:
                text = ""
                for part in got.iter_text():
                    text += part
                    flowing.set()
                return text

        streamed = pool.submit(stream)
        assert flowing.wait(10)
        asked = pool.submit(classify, client, POISON)
        waiting = pool.submit(classify, client, POISON)
        assert seconds_until_not_ready(client) < 2
        refused = classify(client, "good")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stalled")
        assert refused.headers["retry-after"] == "1"
        for one in (asked, waiting):
            assert "started again" in failed(one)["message"]
        last, error = parse_events(streamed.result())[-1]
        assert last == "error" and error["error"]["code"] == "model_failure"
        assert server.wait() == HUNG != 0
        assert "does not end: the process does" in server.rest_of_output()
