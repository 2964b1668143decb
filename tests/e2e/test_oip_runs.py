"""Open Inference Protocol: models that fail, clients that leave, and a queue that is full."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import httpx
from tritonclient.http import InferenceServerClient

from tests.fake_server import fake_server
from tests.oip_client import refusal, texts_in


def test_a_model_that_fails_is_not_ready_and_the_others_are() -> None:
    def fail(kind: str, tokens: object) -> None:
        if kind == "classify":
            raise RuntimeError("broken")

    with fake_server() as fake, InferenceServerClient(f"127.0.0.1:{fake.port}") as client:
        fake.mood.fail = fail
        status, message = refusal(lambda: client.infer("tiny-classify", [texts_in(["x"])]))
        assert status == "503" and message
        assert not client.is_model_ready("tiny-classify") and client.is_server_ready()
        assert client.is_model_ready("tiny-generate") and client.is_server_live()
        states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
        assert states == {"tiny-classify": "UNAVAILABLE", "tiny-generate": "READY"}
        ready = httpx.post(f"{fake.url}/v2/repository/index", json={"ready": True}).json()
        assert [one["name"] for one in ready] == ["tiny-generate"]
        fake.engine.drain()
        assert not client.is_model_ready("tiny-generate") and client.is_server_live()


def test_leaving_takes_every_row_out_of_the_engine() -> None:
    with fake_server() as fake:
        fake.mood.gate.clear()
        body = {
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [3], "data": ["a"] * 3}],
            "parameters": {"max_tokens": 4000, "steps": 2},
        }
        with closing(HTTPConnection("127.0.0.1", fake.port)) as leaving:
            leaving.request("POST", "/v2/models/tiny-generate/infer", json.dumps(body))
            fake.wait_for(running=1, queued=2)
        fake.wait_for(running=0, queued=0)
        fake.mood.gate.set()
        assert fake.metric("stepdial_cancelled_total") == 1  # request


def test_an_overloaded_server_says_when_to_come_back() -> None:
    with fake_server(queue_limit=2) as fake, ThreadPoolExecutor(2) as pool:

        def ask(rows: int) -> httpx.Response:
            tensor = {"name": "text", "datatype": "BYTES", "shape": [rows], "data": ["a"] * rows}
            body = {"inputs": [tensor], "parameters": {"max_tokens": 2}}
            return httpx.post(f"{fake.url}/v2/models/tiny-generate/infer", json=body, timeout=30)

        fake.mood.gate.clear()
        asked = [pool.submit(ask, 1)]
        fake.wait_for(running=1)
        asked.append(pool.submit(ask, 2))
        fake.wait_for(running=1, queued=2)
        response = ask(1)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert list(response.json()) == ["error"]
        # So many rows would find no place however often they came back.
        response = ask(3)
        assert response.status_code == 400 and "retry-after" not in response.headers
        assert "3 texts, but the queue of this server holds 2" in response.json()["error"]
        fake.mood.gate.set()
        assert [one.result().status_code for one in asked] == [200, 200]
