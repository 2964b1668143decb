"""The real process answers: classify, generate, streams."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from serve.api import native
from serve.api.body import BudgetFields, ClassifyRequest, GenerateRequest
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process
from tests.sse import parse_events

CLASSIFIED = TypeAdapter(native.ClassifyResponse)
FIELDS = {"steps", "method", "nfe", "reason", "full_steps", "expected"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders) as running:
        yield running


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["id"] == response.headers["x-request-id"]
    timing = answer["timing"]
    assert timing["queue_ms"] + timing["compute_ms"] <= timing["total_ms"] + 0.01
    assert response.headers["server-timing"] == (
        f"queue;dur={timing['queue_ms']}, compute;dur={timing['compute_ms']}, "
        f"total;dur={timing['total_ms']}"
    )
    return answer


def test_classify_one_text(client: httpx.Client) -> None:
    answer = post(client, "/v1/classify", input="a good film", steps=2)
    CLASSIFIED.validate_python(answer, strict=True)
    (result,) = answer["results"]
    assert set(result) == {"label", "score", "top", "truncated", "budget"}
    assert result["top"][0] == {"label": result["label"], "score": result["score"]}
    assert sum(one["score"] for one in result["top"]) == pytest.approx(1.0)
    assert set(result["budget"]) == FIELDS
    assert result["budget"] | {"expected": None} == {
        "steps": 2,
        "method": "euler",
        "nfe": 2,
        "reason": "exact",
        "full_steps": 4,
        "expected": None,
    }
    assert result["budget"]["expected"] == {
        "metric": "accuracy",
        "value": pytest.approx(0.82),
        "full_value": pytest.approx(0.84),
    }


def test_classify_many_texts_in_their_order(client: httpx.Client) -> None:
    texts = [f"text number {index} " * (index % 7 + 1) for index in range(64)]
    many = post(client, "/v1/classify", input=texts, steps=1)["results"]
    assert len(many) == 64
    for index in (0, 6, 31, 63):
        (alone,) = post(client, "/v1/classify", input=texts[index], steps=1)["results"]
        assert alone["score"] == pytest.approx(many[index]["score"], abs=1e-5)
        assert alone["truncated"] == many[index]["truncated"]


def test_long_texts_are_cut_and_say_so(client: httpx.Client) -> None:
    (result,) = post(client, "/v1/classify", input="long " * 500)["results"]
    assert result["truncated"] is True


def test_top_k_limits_the_labels(client: httpx.Client) -> None:
    (result,) = post(client, "/v1/classify", input="a good film", top_k=1)["results"]
    assert len(result["top"]) == 1


def test_steps_change_the_answer_and_repeat_exactly(client: httpx.Client) -> None:
    scores = {
        steps: post(client, "/v1/classify", input="a good film", steps=steps)["results"][0]["score"]
        for steps in (1, 2, 4)
    }
    assert len(set(scores.values())) == 3
    again = post(client, "/v1/classify", input="a good film", steps=1)["results"][0]["score"]
    assert again == scores[1]


@pytest.mark.parametrize(
    ("asked", "steps", "reason"),
    [({}, 4, "default"), ({"effort": "low"}, 1, "effort"), ({"effort": "max"}, 4, "effort")],
)
def test_every_way_to_ask_for_work(
    client: httpx.Client, asked: dict[str, str], steps: int, reason: str
) -> None:
    budget = post(client, "/v1/generate", prompt="To be", max_tokens=2, **asked)["budget"]
    assert (budget["steps"], budget["reason"]) == (steps, reason)


def test_generate(client: httpx.Client) -> None:
    answer = post(client, "/v1/generate", prompt="To be", max_tokens=12, steps=2)
    native.GenerateResponse.model_validate(answer, strict=True)
    assert len(answer["text"]) == 12 and answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    again = post(
        client, "/v1/generate", prompt="To be", max_tokens=12, steps=2, seed=answer["seed"]
    )
    assert again["text"] == answer["text"]


def test_temperature_zero_needs_no_seed(client: httpx.Client) -> None:
    body = {"prompt": "To be", "max_tokens": 20, "temperature": 0, "steps": 1}
    texts = {post(client, "/v1/generate", **body)["text"] for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("/v1/generate", {"prompt": "To be", "max_tokens": 4, "seed": 1}, GenerateRequest),
        ("/v1/classify", {"input": "good " * 99}, ClassifyRequest),
    ],
)
def test_null_is_as_good_as_nothing(
    client: httpx.Client, path: str, body: dict[str, Any], schema: type[BudgetFields]
) -> None:
    nulls = {name: None for name in schema.model_fields if name not in body}
    # Of two models that could answer, the first does, whether none is named or null.
    found = [post(client, path, **body, **more) for more in ({}, nulls)]
    for answer in found:
        del answer["id"], answer["timing"]
    assert found[0] == found[1]


def test_top_k_one_is_greedy(client: httpx.Client) -> None:
    body = {"prompt": "To be", "max_tokens": 20, "steps": 1}
    greedy = post(client, "/v1/generate", **body, temperature=0)["text"]
    assert post(client, "/v1/generate", **body, top_k=1)["text"] == greedy
    assert post(client, "/v1/generate", **body, top_p=1e-6)["text"] == greedy


def test_an_answer_longer_than_the_window(client: httpx.Client) -> None:
    answer = post(client, "/v1/generate", prompt="a" * 160, max_tokens=400, steps=1)
    assert answer["usage"]["completion_tokens"] == 400


def test_log_probabilities(client: httpx.Client) -> None:
    answer = post(client, "/v1/generate", prompt="To be", max_tokens=3, temperature=0, logprobs=5)
    assert len(answer["logprobs"]) == 3
    for token in answer["logprobs"]:
        assert token["top"][0] == {"token": token["token"], "logprob": token["logprob"]}
        assert len(token["top"]) == 5
    assert "".join(token["token"] for token in answer["logprobs"]) == answer["text"]


def test_a_stop_string(client: httpx.Client) -> None:
    body = {"prompt": "To be", "max_tokens": 60, "temperature": 0, "steps": 2}
    whole = post(client, "/v1/generate", **body)["text"]
    stop = whole[10:13]
    stopped = post(client, "/v1/generate", **body, stop=stop)
    assert stopped["text"] == whole[: whole.index(stop)]
    assert stopped["finish_reason"] == "stop"
    assert post(client, "/v1/generate", **body, stop=["#" * 9, stop])["text"] == stopped["text"]


def test_a_stream_is_the_answer_in_pieces(client: httpx.Client) -> None:
    body = {"prompt": "To be", "max_tokens": 30, "seed": 5, "steps": 2, "logprobs": 1}
    whole = post(client, "/v1/generate", **body)
    response = client.post("/v1/generate", json=body | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["server-timing"].startswith("queue;dur=")
    *tokens, (last, done) = parse_events(response.text)
    assert last == "done" and {name for name, _ in tokens} == {"message"}
    native.DoneChunk.model_validate(done, strict=True)
    for index, (_, chunk) in enumerate(tokens):
        native.TokenChunk.model_validate(chunk, strict=True)
        assert (chunk["index"], chunk["steps"]) == (index, 2)
    assert "".join(chunk["text"] for _, chunk in tokens) == whole["text"]
    assert [chunk["logprob"] for _, chunk in tokens] == whole["logprobs"]
    for field in ("model", "finish_reason", "usage", "budget", "seed"):
        assert done[field] == whole[field]
    assert done["id"] == response.headers["x-request-id"]


def test_a_stream_comes_while_it_is_made(client: httpx.Client) -> None:
    body = {"prompt": "To be", "max_tokens": 2000, "stream": True}
    with client.stream("POST", "/v1/generate", json=body) as response:
        pieces = sum(1 for _ in response.iter_raw())
    assert pieces > 100


def test_a_stop_string_never_leaks_into_a_stream(client: httpx.Client) -> None:
    body = {"prompt": "To be", "max_tokens": 60, "temperature": 0, "steps": 2}
    whole = post(client, "/v1/generate", **body)["text"]
    stop = whole[10:14]
    response = client.post("/v1/generate", json=body | {"stream": True, "stop": stop})
    *tokens, (last, done) = parse_events(response.text)
    text = "".join(chunk["text"] for _, chunk in tokens)
    assert last == "done" and done["finish_reason"] == "stop"
    assert text == whole[: whole.index(stop)]
    assert len(tokens) == done["usage"]["completion_tokens"]


def test_the_caller_may_name_the_request(client: httpx.Client) -> None:
    headers = {"x-request-id": "mine-1"}
    response = client.post("/v1/classify", json={"input": "x"}, headers=headers)
    assert response.headers["x-request-id"] == response.json()["id"] == "mine-1"
    for unsafe in ("has space", "x" * 200, 'quo"te'):
        response = client.get("/v1/models", headers={"x-request-id": unsafe})
        assert response.headers["x-request-id"] != unsafe
