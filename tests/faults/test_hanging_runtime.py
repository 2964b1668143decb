"""The real server when a call of onnxruntime hangs: the call is ended, or else the process is."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.server import HUNG
from tests.fixtures.tiny_folders import generate_bundle
from tests.hanging_graphs import POISON, looping, pooling
from tests.server_process import ServerProcess, server_process
from tests.sse import parse_events

READY = "/health/ready"


def classify(server: ServerProcess, text: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/classify", json={"input": text}, timeout=30)


def seconds_until_not_ready(server: ServerProcess) -> float:
    begun_s = time.monotonic()
    with httpx.Client(base_url=server.url) as client:
        while client.get(READY).status_code == 200:
            assert time.monotonic() < begun_s + 20
            time.sleep(0.01)
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
    with server_process([folder]) as server, ThreadPoolExecutor() as pool:
        assert classify(server, "good").status_code == 200
        asked = pool.submit(classify, server, POISON)
        assert seconds_until_not_ready(server) < 2
        assert "try again" in failed(asked)["message"]
        end_s = time.monotonic() + 10
        while httpx.get(f"{server.url}{READY}").status_code != 200:
            assert time.monotonic() < end_s
        assert classify(server, "good").status_code == 200
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'stepdial_late_calls_total{model="looping"} 1.0' in metrics
        assert 'stepdial_terminated_calls_total{model="looping"} 1.0' in metrics
        server.terminate()
        assert server.wait() == 0


@pytest.mark.long
def test_a_call_that_cannot_be_ended_ends_the_process(tmp_path: Path) -> None:
    folders = [pooling(tmp_path / "pooling").folder, generate_bundle().folder]
    flags = ("--stall-exit-s", "1", "--max-tokens", "1000000", "--threads", "1")
    with server_process(folders, *flags) as server, ThreadPoolExecutor() as pool:
        assert classify(server, "good").status_code == 200
        flowing = threading.Event()

        def stream() -> str:
            body = {"prompt": "a", "max_tokens": 1_000_000, "stream": True, "steps": 1}
            with httpx.stream("POST", f"{server.url}/v1/generate", json=body, timeout=30) as got:
                text = ""
                for part in got.iter_text():
                    text += part
                    flowing.set()
                return text

        streamed = pool.submit(stream)
        assert flowing.wait(10)
        asked = pool.submit(classify, server, POISON)
        waiting = pool.submit(classify, server, POISON)
        assert seconds_until_not_ready(server) < 2
        refused = classify(server, "good")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stalled")
        assert refused.headers["retry-after"] == "1"
        for one in (asked, waiting):
            assert "started again" in failed(one)["message"]
        last, error = parse_events(streamed.result())[-1]
        assert last == "error" and error["error"]["code"] == "model_failure"
        assert server.wait() == HUNG != 0
        assert "does not end: the process does" in server.rest_of_output()
