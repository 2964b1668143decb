"""A model that throws, hangs or computes nonsense: structured errors, and a server that lives."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fake_server import FakeServer, fake_server
from tests.sse import parse_events
from tests.waiting import wait_until

CLASSIFY = {"input": "text", "steps": 2}
GENERATE = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "steps": 2}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server(queue_limit=4) as running:
        yield running


def post(server: FakeServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=20)


def throw_on(kind: str, after: int = 0) -> Any:
    calls = iter(range(10**9))

    def fail(called: str, tokens: Any) -> None:
        if called == kind and next(calls) >= after:
            raise RuntimeError("a secret detail of the runtime")

    return fail


def structured(response: httpx.Response, code: str) -> dict[str, Any]:
    assert response.status_code == 503, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code and "secret" not in response.text
    return error


def test_a_call_that_throws_is_a_503_and_the_next_is_well(server: FakeServer) -> None:
    server.mood.fail = throw_on("classify")
    assert (
        "try again"
        in structured(post(server, "/v1/classify", CLASSIFY), "model_failure")["message"]
    )
    server.mood.fail = throw_on("prefill")
    structured(post(server, "/v1/generate", GENERATE), "model_failure")
    structured(post(server, "/v1/generate", GENERATE | {"stream": True}), "model_failure")
    server.mood.fail = lambda kind, tokens: None
    assert post(server, "/v1/classify", CLASSIFY).status_code == 200
    assert post(server, "/v1/generate", GENERATE).json()["text"] == "defghijk"
    assert server.metric("stepdial_runtime_failures_total", model="tiny-generate") == 2
    assert server.metric("stepdial_rejected_total", reason="model_failure") == 3


def test_a_stream_that_fails_midway_ends_with_one_error_event(server: FakeServer) -> None:
    server.mood.fail = throw_on("decode", after=3)
    response = post(server, "/v1/generate", GENERATE | {"stream": True})
    assert response.status_code == 200
    *tokens, (last, error) = parse_events(response.text)
    assert [chunk["text"] for _, chunk in tokens] == ["d", "e", "f", "g"]
    assert last == "error" and error["error"]["code"] == "model_failure"


def test_not_a_number_is_a_503_of_that_request(server: FakeServer) -> None:
    server.mood.logits = lambda logits: np.full_like(logits, np.nan)
    structured(post(server, "/v1/classify", CLASSIFY), "model_failure")
    structured(post(server, "/v1/generate", GENERATE), "model_failure")
    server.mood.logits = lambda logits: logits
    assert post(server, "/v1/classify", CLASSIFY).status_code == 200


def ready(server: FakeServer) -> bool:
    return httpx.get(f"{server.url}/health/ready").status_code == 200


def wait_until_ready(server: FakeServer) -> None:
    wait_until(lambda: ready(server), most_s=5)


def test_a_call_that_hangs_turns_readiness_off_and_liveness_stays() -> None:
    with (
        fake_server(stall_s=0.3, stall_unknown_s=0.3, stall_exit_s=60) as server,
        ThreadPoolExecutor() as pool,
    ):
        server.mood.gate.clear()
        stuck = pool.submit(post, server, "/v1/classify", CLASSIFY)
        server.wait_for(running=1)
        wait_until(lambda: not ready(server))
        began_s = time.monotonic()
        response = httpx.get(f"{server.url}/health/ready")
        assert time.monotonic() - began_s < 1
        assert "has taken" in structured(response, "stalled")["message"]
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        refused = post(server, "/v1/generate", GENERATE)
        structured(refused, "stalled")
        assert refused.headers["retry-after"] == "60"
        server.mood.gate.set()
        assert stuck.result().status_code == 200
        wait_until_ready(server)


def readiness(server: FakeServer, name: str) -> bool:
    """What every place that tells says of this model."""
    card = httpx.get(f"{server.url}/v1/models/{name}").json()
    (listed,) = (
        one["ready"]
        for one in httpx.get(f"{server.url}/v1/models").json()["data"]
        if one["id"] == name
    )
    oip = httpx.get(f"{server.url}/v2/models/{name}/ready").status_code == 200
    metric = server.metric("stepdial_model_ready", model=name) == 1
    assert card["ready"] == listed == oip == metric
    return oip


def test_a_model_that_throws_turns_off_its_own_readiness_until_it_works(
    server: FakeServer,
) -> None:
    server.mood.fail = throw_on("classify")
    structured(post(server, "/v1/classify", CLASSIFY), "model_failure")
    assert not readiness(server, "tiny-classify") and readiness(server, "tiny-generate")
    assert ready(server), "another model works"
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
    assert post(server, "/v1/generate", GENERATE).status_code == 200
    assert not readiness(server, "tiny-classify"), "it was another model that worked"
    server.mood.fail = lambda kind, tokens: None
    assert post(server, "/v1/classify", CLASSIFY).status_code == 200
    assert readiness(server, "tiny-classify")


def test_the_process_is_not_ready_while_every_model_fails(server: FakeServer) -> None:
    def fail(kind: str, tokens: Any) -> None:
        raise RuntimeError("a secret detail of the runtime")

    server.mood.fail = fail
    structured(post(server, "/v1/classify", CLASSIFY), "model_failure")
    assert ready(server)
    structured(post(server, "/v1/generate", GENERATE), "model_failure")
    for path in ("/health/ready", "/health"):
        refusal = structured(httpx.get(server.url + path), "not_ready")
        assert "the last call of tiny-classify, tiny-generate failed" in refusal["message"]
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    server.mood.fail = lambda kind, tokens: None
    wait_until_ready(server)  # the server tries again by itself
    assert readiness(server, "tiny-classify") or readiness(server, "tiny-generate")


def test_the_only_model_is_the_process() -> None:
    with fake_server() as server:
        server.engine.dismiss(server.engine.catalog.find("tiny-generate"))
        server.mood.fail = throw_on("classify")
        structured(post(server, "/v1/classify", CLASSIFY), "model_failure")
        refusal = structured(httpx.get(f"{server.url}/health/ready"), "not_ready")
        assert "the last call of tiny-classify failed" in refusal["message"]
        server.mood.fail = lambda kind, tokens: None
        wait_until_ready(server)


def test_a_dead_engine_turns_everything_off(server: FakeServer) -> None:
    def die(kind: str, tokens: Any) -> None:
        raise SystemExit("our own bug")

    server.mood.fail = die
    structured(post(server, "/v1/classify", CLASSIFY), "not_ready")
    structured(post(server, "/v1/classify", CLASSIFY), "not_ready")
    structured(httpx.get(f"{server.url}/health/ready"), "not_ready")
    structured(httpx.get(f"{server.url}/health/live"), "not_ready")


def test_a_flood_is_answered_and_told_when_to_come_back(server: FakeServer) -> None:
    for _ in range(20):
        post(server, "/v1/classify", CLASSIFY)
    server.mood.gate.clear()
    with ThreadPoolExecutor(60) as pool:
        first = pool.submit(post, server, "/v1/classify", CLASSIFY)
        server.wait_for(running=1)
        flood = [pool.submit(post, server, "/v1/classify", CLASSIFY) for _ in range(50)]
        rejected = partial(server.metric, "stepdial_rejected_total", reason="queue_full")
        wait_until(lambda: rejected() == 46)
        server.mood.gate.set()
        responses = [one.result() for one in (first, *flood)]
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) == 46
    assert [response.status_code for response in responses].count(200) == 5
    for response in refused:
        error = response.json()["error"]
        assert error["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert int(response.headers["retry-after-ms"]) == error["retry_after_ms"] > 0
    server.wait_for(running=0, queued=0)


def test_refusals_are_quick_while_the_model_is_busy(server: FakeServer) -> None:
    server.mood.gate.clear()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(post, server, "/v1/classify", CLASSIFY)]
        server.wait_for(running=1)
        waiting += [pool.submit(post, server, "/v1/classify", CLASSIFY) for _ in range(4)]
        server.wait_for(running=1, queued=4)
        with httpx.Client(base_url=server.url) as client:
            client.get("/health/live")
            began_s = time.monotonic()
            for _ in range(20):
                assert client.post("/v1/classify", json=CLASSIFY).status_code == 429
            assert (time.monotonic() - began_s) / 20 < 0.1
        server.mood.gate.set()
        assert [one.result().status_code for one in waiting] == [200] * 5


def test_rows_of_many_requests_share_calls_under_load() -> None:
    with fake_server(batch_rows=8) as server:
        server.mood.gate.clear()
        with ThreadPoolExecutor(40) as pool:
            asked = [pool.submit(post, server, "/v1/classify", CLASSIFY)]
            server.wait_for(running=1)
            asked += [pool.submit(post, server, "/v1/classify", CLASSIFY) for _ in range(32)]
            server.wait_for(running=1, queued=32)
            server.mood.gate.set()
            assert {one.result().status_code for one in asked} == {200}
        assert [shape[0] for _, _, shape in server.mood.calls] == [1, 8, 8, 8, 8]


def test_prompts_and_tokens_take_turns_under_load() -> None:
    with fake_server() as server:
        began = threading.Event()

        def slow(kind: str, tokens: Any) -> None:
            began.set()
            time.sleep(0.001)

        server.mood.fail = slow
        with ThreadPoolExecutor(20) as pool:
            body = GENERATE | {"max_tokens": 30}
            asked = [pool.submit(post, server, "/v1/generate", body) for _ in range(16)]
            assert {one.result().status_code for one in asked} == {200}
        kinds = [kind for kind, _, _ in server.mood.calls]
        assert "prefill prefill" not in " ".join(kinds)
