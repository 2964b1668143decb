"""Times of requests by steps are of those that were answered; refusals have times of their own.

What fails when its answer has begun counts as failed too.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fake_server import FakeServer, fake_server
from tests.faults.raw_http import error_code, head, status, until_closed
from tests.waiting import wait_until

KNOWN_ERRORS = {"invalid_field", "invalid_json", "unknown_model", "not_found"}

PATH = "/v1/generate"
MODEL = "tiny-generate"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server(queue_limit=1) as running:
        yield running


def ask(server: FakeServer, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 3} | fields
    return httpx.post(f"{server.url}{PATH}", json=body, timeout=20)


def answered(server: FakeServer, steps: str) -> float:
    labels = {"route": PATH, "model": MODEL, "steps": steps}
    return server.metric("stepdial_request_seconds_count", **labels)


def refused(server: FakeServer, code: int, model: str = MODEL) -> float:
    labels = {"route": PATH, "model": model, "code": str(code)}
    return server.metric("stepdial_refused_seconds_count", **labels)


def all_answered(server: FakeServer) -> float:
    families = server.metrics.registry.collect()
    (found,) = (one for one in families if one.name == "stepdial_request_seconds")
    return sum(
        sample.value
        for sample in found.samples
        if sample.name.endswith("_count") and sample.labels["route"] == PATH
    )


def test_an_answer_counts_under_its_rung(server: FakeServer) -> None:
    assert ask(server, steps=2).status_code == 200
    assert ask(server, steps=2, stream=True).status_code == 200
    assert answered(server, "2") == all_answered(server) == 2


def test_a_refusal_counts_under_no_rung(server: FakeServer) -> None:
    assert ask(server, steps=4, deadline_ms=0.001).status_code in (422, 504)
    assert ask(server, n=1).status_code == 422
    assert ask(server, max_tokens=10**6).status_code == 422
    assert all_answered(server) == 0
    assert refused(server, 422, "") == 1  # before its model was looked for
    assert refused(server, 422) + refused(server, 504) == 2


def test_a_full_queue_counts_under_no_rung(server: FakeServer) -> None:
    server.mood.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server, steps=4)
        server.wait_for(running=1)
        second = pool.submit(ask, server, steps=2)  # of another rung, so it waits
        server.wait_for(running=1, queued=1)
        assert ask(server, steps=4).status_code == 429
        server.mood.gate.set()
        assert [one.result().status_code for one in (first, second)] == [200, 200]
    assert refused(server, 429) == 1
    assert answered(server, "4") == answered(server, "2") == 1


def test_work_that_fails_counts_under_no_rung(server: FakeServer) -> None:
    def fail(kind: str, _: object) -> None:
        raise RuntimeError("out of memory")

    server.mood.fail = fail
    assert ask(server, steps=4).status_code == 503
    assert all_answered(server) == 0 and refused(server, 503) == 1


def after_the_first_token(server: FakeServer, kind: str) -> None:
    """Hold up what decodes."""
    if kind == "decode":
        server.mood.gate.clear()


def counted(server: FakeServer, code: int) -> float:
    labels = {"route": PATH, "model": MODEL, "code": str(code)}
    return server.metric("stepdial_requests_total", **labels)


def test_a_stream_that_fails_counts_as_failed(server: FakeServer) -> None:
    server.mood.fail = lambda kind, _: after_the_first_token(server, kind)
    answer = ask(server, stream=True, deadline_ms=300)
    assert answer.status_code == 200 and "deadline_lapsed" in answer.text
    server.mood.gate.set()
    assert all_answered(server) == counted(server, 200) == 0
    assert refused(server, 504) == counted(server, 504) == 1
    assert server.metric("stepdial_rejected_total", reason="deadline_lapsed") == 1


def test_a_stream_whose_client_leaves_counts_as_left(server: FakeServer) -> None:
    server.mood.fail = lambda kind, _: after_the_first_token(server, kind)
    asked = {"model": MODEL, "prompt": "abc", "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{server.url}{PATH}", json=asked) as answer:
        next(answer.iter_lines())
    server.mood.gate.set()
    server.wait_for(running=0)
    assert all_answered(server) == counted(server, 200) == 0
    assert refused(server, 499) == counted(server, 499) == 1


@pytest.mark.parametrize("path", [PATH, "/nowhere"])
def test_a_body_that_is_not_http_counts_as_what_its_client_was_told(
    server: FakeServer, path: str
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        sent = head(None, "transfer-encoding: chunked", path=path)
        connection.sendall(sent + b'4\r\n{"a"\r\nno chunk\r\n')
        answer = until_closed(connection, 5)
    assert (status(answer), error_code(answer)) == (400, "bad_http")
    labels = {"route": PATH if path == PATH else "none", "model": "", "code": "400"}
    wait_until(lambda: server.metric("stepdial_requests_total", **labels) == 1)
    assert server.metric("stepdial_rejected_total", reason="bad_http") == 1
    assert server.metric("stepdial_rejected_total", reason="not_found") == 0


def test_every_error_counts_by_its_code(server: FakeServer) -> None:
    ask(server, n=1)
    ask(server, model="nobody")
    httpx.post(f"{server.url}{PATH}", content=b"{")
    httpx.get(f"{server.url}/nowhere")
    for code in KNOWN_ERRORS:
        assert server.metric("stepdial_rejected_total", reason=code) == 1
