"""deadline_ms, min_steps and max_steps over HTTP: steps that fit, refusals at once, 504 in time."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serve.engine.cost import CostKey
from tests.fake_server import FakeServer, fake_server
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import server_process
from tests.sse import parse_events

CLASSIFY, GENERATE = "/v1/classify", "/v1/generate"
TEXT: dict[str, Any] = {"input": "a good film"}
PROMPT: dict[str, Any] = {"prompt": "To be", "max_tokens": 4}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with (
        server_process(folders) as server,
        httpx.Client(base_url=server.url, timeout=30) as connected,
    ):
        yield connected


def budget(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer = response.json()
    found: dict[str, Any] = answer.get("budget") or answer["results"][0]["budget"]
    return found


def error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["code"] == code
    return found


@pytest.mark.parametrize(("path", "body"), [(CLASSIFY, TEXT), (GENERATE, PROMPT)])
def test_time_enough_gives_the_most_steps(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    found = budget(client.post(path, json=body | {"deadline_ms": 20_000}))
    assert (found["steps"], found["reason"], found["full_steps"]) == (4, "deadline", 4)
    assert found["expected"]["value"] == found["expected"]["full_value"]
    limited = body | {"deadline_ms": 20_000, "max_steps": 3}
    assert budget(client.post(path, json=limited))["steps"] == 2


@pytest.mark.parametrize(("path", "body"), [(CLASSIFY, TEXT), (GENERATE, PROMPT)])
def test_what_is_impossible_names_the_least_time(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    for steps in ({}, {"steps": 4}, {"effort": "low"}, {"min_steps": 2}):
        refused = client.post(path, json=body | steps | {"deadline_ms": 0.01})
        found = error(refused, 422, "impossible_deadline")
        assert found["param"] == "deadline_ms" and found["least_ms"] >= 1
        assert "retry-after" not in refused.headers


@pytest.mark.parametrize(
    ("fields", "steps", "reason"),
    [
        ({"min_steps": 2}, 4, "default"),
        ({"max_steps": 2}, 2, "default"),
        ({"max_steps": 1, "min_steps": 1}, 1, "default"),
        ({"steps": 2, "min_steps": 1, "max_steps": 4}, 2, "exact"),
        ({"steps": 2, "deadline_ms": 20_000}, 2, "exact"),
        ({"effort": "low", "deadline_ms": 20_000}, 1, "effort"),
    ],
)
def test_limits_and_exact_steps(
    client: httpx.Client, fields: dict[str, Any], steps: int, reason: str
) -> None:
    for path, body in ((CLASSIFY, TEXT), (GENERATE, PROMPT)):
        found = budget(client.post(path, json=body | fields))
        assert (found["steps"], found["reason"]) == (steps, reason)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_steps": 3, "max_steps": 3}, "min_steps"),
        ({"min_steps": 4, "max_steps": 2}, "min_steps"),
        ({"min_steps": 5}, "min_steps"),
        ({"steps": 1, "min_steps": 2}, "min_steps"),
        ({"effort": "max", "max_steps": 2}, "max_steps"),
    ],
)
def test_contradictions_name_the_field(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for path, body in ((CLASSIFY, TEXT), (GENERATE, PROMPT)):
        found = error(client.post(path, json=body | fields), 422, "impossible_budget")
        assert found["param"] == param


@pytest.mark.parametrize("value", [0, -5, "100", True, 1e9])
def test_a_deadline_is_a_time(client: httpx.Client, value: object) -> None:
    response = client.post(CLASSIFY, json=TEXT | {"deadline_ms": value})
    assert error(response, 422, "invalid_field")["param"] == "deadline_ms"


# On a model that can be held up.


def post(server: FakeServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=30)


def observe(server: FakeServer, seconds: float) -> None:
    """Let the server believe that a call of TEXT takes so long at 4 steps, or in proportion."""
    served = server.engine.catalog.find("tiny-classify")
    length = len(served.codec.encode_input(TEXT["input"], truncate=True).tokens)
    for steps in (1, 2, 4):
        cost_key = CostKey("classify", steps)
        for _ in range(5):
            server.engine.cost(served).observe(cost_key, 1, length, seconds * steps / 4)


def test_a_deadline_that_lapses_ends_the_work_though_the_model_hangs() -> None:
    with fake_server() as server:
        server.mood.gate.clear()
        begun_s = time.perf_counter()
        response = post(server, CLASSIFY, TEXT | {"deadline_ms": 200})
        took_s = time.perf_counter() - begun_s
        assert error(response, 504, "deadline_lapsed")["param"] == "deadline_ms"
        assert 0.19 <= took_s < 1.0
        server.mood.gate.set()
        server.wait_for()
        assert server.metric("stepdial_lapsed_total", model="tiny-classify") == 1
        assert server.metric("stepdial_cancelled_total") == 0


def test_a_text_that_is_late_comes_as_far_as_it_got() -> None:
    with fake_server() as server:
        server.mood.fail = lambda kind, tokens: time.sleep(0.02)
        body = {"prompt": "abc", "max_tokens": 400, "temperature": 0.0, "deadline_ms": 300}
        streamed = post(server, GENERATE, body | {"stream": True})
        *tokens, (name, last) = parse_events(streamed.text)
        assert (streamed.status_code, name) == (200, "error")
        assert last["error"]["code"] == "deadline_lapsed"
        text = "".join(chunk["text"] for _, chunk in tokens)
        assert text.startswith("def") and last["error"]["text"].startswith(text)
        server.wait_for()
        end_s = time.monotonic() + 10
        while server.mood.open_rows:  # until the call that ran is over
            assert time.monotonic() < end_s, "the row is still there"
            time.sleep(0.002)


def test_a_late_request_of_several_texts_is_one() -> None:
    with fake_server() as server:
        server.mood.fail = lambda kind, tokens: time.sleep(0.02)
        body = {"prompt": "abc", "max_tokens": 400, "n": 3, "deadline_ms": 300}
        error(post(server, "/v1/completions", body), 504, "deadline_lapsed")
        server.wait_for()
        assert server.metric("stepdial_deadlines_total", model="tiny-generate") == 1
        assert server.metric("stepdial_lapsed_total", model="tiny-generate") == 1


def test_a_whole_answer_that_is_late_is_a_504_with_what_was_written() -> None:
    with fake_server() as server:
        server.mood.fail = lambda kind, tokens: time.sleep(0.02)
        body = {"prompt": "abc", "max_tokens": 400, "temperature": 0.0, "deadline_ms": 300}
        found = error(post(server, GENERATE, body), 504, "deadline_lapsed")
        assert found["text"].startswith("def")
        server.wait_for()


def test_behind_a_queue_the_refusal_comes_at_once_and_says_when_to_come_back() -> None:
    with fake_server(batch_rows=1) as server, ThreadPoolExecutor(8) as pool:
        observe(server, 4.0)
        server.mood.gate.clear()
        ahead: list[Future[httpx.Response]] = [
            pool.submit(post, server, CLASSIFY, TEXT | {"steps": 4})
        ]
        server.wait_for(running=1)
        begun_s = time.perf_counter()
        response = post(server, CLASSIFY, TEXT | {"deadline_ms": 2000})
        assert time.perf_counter() - begun_s < 0.5
        found = error(response, 429, "too_busy")
        # The call before it takes 4 s, its own a quarter of that: 3 s more than it gave.
        assert 2.0 < found["retry_after_ms"] / 1000 < 6.0
        assert float(response.headers["retry-after"]) >= found["retry_after_ms"] / 1000
        assert server.metric("stepdial_rejected_total", reason="too_busy") == 1
        server.mood.gate.set()
        assert ahead[0].result().status_code == 200


_TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [""]}


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        (CLASSIFY, {"input": "good " * 200, "truncate": False, "deadline_ms": 2500}, "tokens"),
        (
            "/v2/models/tiny-classify/infer",
            {"inputs": [_TENSOR], "parameters": {"deadline_ms": 2500}},
            "empty",
        ),
    ],
)
def test_what_has_no_time_is_refused_before_it_is_read(
    path: str, body: dict[str, Any], read: str
) -> None:
    with fake_server(batch_rows=1) as server, ThreadPoolExecutor(24) as pool:
        observe(server, 0.4)
        response = post(server, path, body)
        assert response.status_code in (400, 422) and read in response.text
        server.mood.gate.clear()
        ahead = [pool.submit(post, server, CLASSIFY, TEXT) for _ in range(24)]
        server.wait_for(running=1, queued=23)
        response = post(server, path, body)
        assert response.status_code == 429 and "behind what waits" in response.text
        server.mood.gate.set()
        assert {one.result().status_code for one in ahead} == {200}


def degraded(server: FakeServer) -> list[dict[str, Any]]:
    """What became of eight requests that came while a call was held up."""
    observe(server, 0.5)
    server.mood.gate.clear()
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(post, server, CLASSIFY, TEXT)
        server.wait_for(running=1)
        others = [pool.submit(post, server, CLASSIFY, TEXT) for _ in range(8)]
        others.append(pool.submit(post, server, CLASSIFY, TEXT | {"min_steps": 2}))
        others.append(pool.submit(post, server, CLASSIFY, TEXT | {"steps": 4}))
        server.wait_for(running=1, queued=10)
        server.mood.gate.set()
        assert budget(first.result())["reason"] == "default"
        return [budget(other.result()) for other in others]


def test_while_much_waits_requests_get_fewer_steps_and_are_told() -> None:
    with fake_server(batch_rows=1) as server:
        *free, least, exact = degraded(server)
        assert free[0]["steps"] == 1 and free[0]["reason"] == "load"
        assert free[0]["expected"]["value"] != free[0]["expected"]["full_value"]
        assert {one["reason"] for one in free} <= {"load", "default"}
        assert all((one["reason"] == "default") == (one["steps"] == 4) for one in free)
        assert least["steps"] >= 2
        assert (exact["steps"], exact["reason"]) == (4, "exact")
        told = sum(one["reason"] == "load" for one in [*free, least])
        assert server.metric("stepdial_degraded_total", model="tiny-classify") == told
        # And back again, once nothing waits.
        assert budget(post(server, CLASSIFY, TEXT))["reason"] == "default"


def test_a_setting_keeps_the_steps_whatever_waits() -> None:
    with fake_server(batch_rows=1, degrade=False) as server:
        assert {one["steps"] for one in degraded(server)} == {4}


def test_the_queue_is_bounded_by_its_predicted_wait() -> None:
    with fake_server(batch_rows=1, queue_wait_s=3.0, degrade=False) as server:
        observe(server, 4.0)
        server.mood.gate.clear()
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(post, server, CLASSIFY, TEXT | {"steps": 4})
            server.wait_for(running=1)
            found = error(post(server, CLASSIFY, TEXT | {"steps": 1}), 429, "queue_full")
            assert found["retry_after_ms"] > 3000
            server.mood.gate.set()
            assert first.result().status_code == 200
