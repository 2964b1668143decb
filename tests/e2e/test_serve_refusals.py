"""What the real process refuses: always a 4xx of one shape that says what to do."""

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process

CLASSIFY, GENERATE, EMBED = "/v1/classify", "/v1/generate", "/v1/embeddings"
TEXT = {"input": "a good film"}
PROMPT = {"prompt": "To be", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders, "--max-tokens", "1000") as running:
        yield running


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert {"code", "message", "param"} <= set(error)
    assert error["code"] == code, error
    assert len(error["message"]) > 10
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CLASSIFY, TEXT | {"steps": 3}, "steps", "1, 2, 4"),
        (GENERATE, PROMPT | {"steps": 1, "effort": "low"}, "effort", "send one"),
        (GENERATE, PROMPT | {"steps": 2**31 - 1}, "steps", "1, 2, 4"),
    ],
)
def test_impossible_budgets(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(client.post(path, json=body), 422, "impossible_budget")
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CLASSIFY, {}, "input", "missing"),
        (GENERATE, {}, "prompt", "missing"),
        (CLASSIFY, {"inputs": "x"}, "inputs", "did you mean input?"),
        (GENERATE, {"promt": "x", "max_tokens": 0}, "promt", "did you mean prompt?"),
        (CLASSIFY, TEXT | {"step": 2}, "step", "did you mean steps?"),
        (CLASSIFY, TEXT | {"zzzzzz": 2}, "zzzzzz", "there are"),
        (CLASSIFY, {"text": "x"}, "text", "input is missing, did you mean that?"),
        (GENERATE, {"input": "x"}, "input", "prompt is missing, did you mean that?"),
        (GENERATE, PROMPT | {"reasoning_effort": "low"}, "reasoning_effort", "mean effort?"),
        (GENERATE, PROMPT | {"num_inference_steps": 2}, "num_inference_steps", "mean steps?"),
        (GENERATE, PROMPT | {"mx_steps": 2}, "mx_steps", "mean max_steps?"),
        (GENERATE, PROMPT | {"stop_sequences": ["x"]}, "stop_sequences", "mean stop?"),
        (GENERATE, PROMPT | {"temp": 0}, "temp", "mean temperature?"),
        (EMBED, TEXT | {"reasoning_effort": "low"}, "reasoning_effort", "mean effort?"),
        (CLASSIFY, {"input": ""}, "input", "input is empty"),
        (CLASSIFY, {"input": []}, "input", "send at least 1 item"),
        (CLASSIFY, {"input": ["x"] * 65}, "input", "has 65 items: send at most 64"),
        (CLASSIFY, {"input": ["x", ""]}, "input[1]", "is empty"),
        (CLASSIFY, {"input": ["x", 3]}, "input[1]", "must be a string"),
        (CLASSIFY, {"input": 3}, "input", "must be a string, {"),
        (CLASSIFY, {"input": {}}, "input", "or a list of these"),
        (CLASSIFY, {"input": {"image": 1, "points": 2}}, "input", 'or {"points": ...}'),
        (GENERATE, PROMPT | {"num_beams": 0}, "num_beams", "at least 1"),
        (GENERATE, PROMPT | {"num_beams": 9}, "num_beams", "at most 8"),
        (GENERATE, PROMPT | {"num_beams": 4}, "num_beams", "is for translation"),
        (CLASSIFY, {"input": {"text": "x"}}, "input", "must be a string"),
        (CLASSIFY, {"input": None}, "input", "must be a string"),
        (CLASSIFY, TEXT | {"top_k": 3}, "top_k", "2 labels"),
        (CLASSIFY, TEXT | {"top_k": 0}, "top_k", "at least 1"),
        (CLASSIFY, TEXT | {"truncate": "no"}, "truncate", "true or false"),
        (CLASSIFY, TEXT | {"steps": "2"}, "steps", "integer"),
        (CLASSIFY, TEXT | {"steps": True}, "steps", "integer"),
        (CLASSIFY, TEXT | {"steps": 2.5}, "steps", "integer"),
        (CLASSIFY, TEXT | {"steps": 0}, "steps", "at least 1"),
        (CLASSIFY, TEXT | {"steps": 10**30}, "steps", "at most"),
        (CLASSIFY, TEXT | {"effort": "huge"}, "effort", "'low', 'medium', 'high' or 'max'"),
        (CLASSIFY, TEXT | {"model": 7}, "model", "string"),
        (GENERATE, {"prompt": ""}, "prompt", "is empty"),
        (GENERATE, {"prompt": ["To be"]}, "prompt", "string"),
        (GENERATE, PROMPT | {"max_tokens": 0}, "max_tokens", "at least 1"),
        (GENERATE, PROMPT | {"max_tokens": 1001}, "max_tokens", "at most 1000"),
        (GENERATE, PROMPT | {"temperature": -1}, "temperature", "at least 0"),
        (GENERATE, PROMPT | {"temperature": 2.1}, "temperature", "at most 2"),
        (GENERATE, PROMPT | {"temperature": "hot"}, "temperature", "number"),
        (GENERATE, PROMPT | {"top_p": -0.1}, "top_p", "at least 0"),
        (GENERATE, PROMPT | {"top_k": 0}, "top_k", "at least 1"),
        (GENERATE, PROMPT | {"seed": -(2**63) - 1}, "seed", "at least"),
        (GENERATE, PROMPT | {"seed": 2**63}, "seed", "at most"),
        (GENERATE, PROMPT | {"stop": ""}, "stop", "is empty"),
        (
            GENERATE,
            PROMPT | {"stop": ["a", "b", "c", "d", "e"]},
            "stop",
            "has 5 items: send at most 4",
        ),
        (GENERATE, PROMPT | {"logprobs": 6}, "logprobs", "at most 5"),
        (GENERATE, PROMPT | {"stream": 1}, "stream", "true or false"),
        (GENERATE, PROMPT | {"n": 2}, "n", "unknown field"),
    ],
)
def test_fields_that_do_not_fit(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(client.post(path, json=body), 422, "invalid_field")
    assert error["param"] == param
    assert says in error["message"], error["message"]
    assert "validation" not in error["message"] and "should" not in error["message"]


@pytest.mark.parametrize(("path", "query"), [(CLASSIFY, "a=1&steps=2"), (EMBED, "model")])
def test_a_field_in_the_url_is_told_where_it_belongs(
    client: httpx.Client, path: str, query: str
) -> None:
    error = refused(client.post(f"{path}?{query}", json=TEXT), 422, "invalid_field")
    name = error["param"]
    assert error["message"] == f"{name} in the URL is not read: send it in the JSON body"
    assert client.post(f"{CLASSIFY}?api-version=7&=&%ff", json=TEXT).status_code == 200


def test_a_kind_of_input_that_no_model_takes(client: httpx.Client) -> None:
    body = {"input": {"points": [[0.1, 0.2, 0.3]]}}
    error = refused(client.post(CLASSIFY, json=body), 422, "wrong_input")
    assert error["message"] == "no served model takes points; the first, tiny-classify, takes text"
    assert (error["param"], error["input"]) == ("input", "text")


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (GENERATE, {"prompt": "naïve"}, "prompt", "'ï' (U+00EF) at index 2"),
        (GENERATE, {"prompt": "nul \x00"}, "prompt", r"'\x00' (U+0000) at index 4"),
        (GENERATE, {"prompt": "a" * 161}, "prompt", "at most 160"),
        (GENERATE, {"prompt": "a" * 900_000}, "prompt", "at most 160"),
        (CLASSIFY, {"input": "long " * 99, "truncate": False}, "input", "at most 48"),
        (CLASSIFY, {"input": ["x", "long " * 99], "truncate": False}, "input[1]", "at most 48"),
    ],
)
def test_texts_that_the_model_cannot_read(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(client.post(path, json=body), 422, "unprocessable")
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/models/tiny-classify/", "/v1/models/tiny-classify"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/classify/", "/v1/classify"),
        ("/v1/v2/models/tiny-classify", "/v2/models/tiny-classify"),
        ("/v1/responses", None),
        ("/static/nothing.js/", None),
        ("/v1/", None),
    ],
)
def test_a_path_that_is_almost_right_is_told_so(
    client: httpx.Client, sent: str, meant: str | None
) -> None:
    hint = "see /docs" if meant is None else f"did you mean {meant}?"
    error = refused(client.get(sent), 404, "not_found")
    assert error["message"] == f"there is nothing at {sent}: {hint}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"not json",
        b'{"input": "x",}',
        b"{'input': 'x'}",
        b'{"input": "\xff\xfe"}',
        b'{"input": "\xed\xa0\x80"}',
        b'{"input": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"input": ' + b"[" * 100_000,
        b"[" * 900_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"input": "x"} trailing',
        "{'input': 'ü'}".encode("utf-16"),
        b"\x00\x01\x02",
        b"input=hello",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_that_are_not_json(client: httpx.Client, body: bytes) -> None:
    for path in (CLASSIFY, GENERATE):
        error = refused(client.post(path, content=body), 400, "invalid_json")
        assert "JSON" in error["message"]


@pytest.mark.parametrize("path", [CLASSIFY, GENERATE, "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 99])
def test_an_encoding_that_is_not_known_is_named(
    client: httpx.Client, path: str, encoding: str
) -> None:
    body = gzip.compress(json.dumps(TEXT | PROMPT).encode())
    response = client.post(path, content=body, headers={"content-encoding": encoding})
    message = refused(response, 415, "unsupported_encoding")["message"]
    assert "send it as gzip, as deflate, or without content-encoding" in message
    assert response.headers["accept-encoding"] == "gzip, deflate"
    plain = client.post(GENERATE, json=PROMPT, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("Deflate", zlib.compress)]
)
def test_a_compressed_body_is_unpacked(
    client: httpx.Client, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    def send(body: bytes) -> httpx.Response:
        return client.post(GENERATE, content=body, headers={"content-encoding": encoding})

    asked = PROMPT | {"seed": 7}
    body = pack(json.dumps(asked).encode())
    assert send(body).json()["text"] == client.post(GENERATE, json=asked).json()["text"]
    for wrong in (b"", json.dumps(asked).encode(), body[:-3], body + b"more"):
        message = refused(send(wrong), 400, "invalid_json")["message"]
        assert f"the body is not {encoding.lower()}" in message


def test_a_bomb_is_not_unpacked(client: httpx.Client) -> None:
    """300 MB that are 0.3 MB on the way, which would take a second and their memory."""
    bomb = gzip.compress(b" " * 300_000_000, 1)[:1_000_000]
    began_s = time.monotonic()
    response = client.post(GENERATE, content=bomb, headers={"content-encoding": "gzip"})
    assert "larger than" in refused(response, 413, "payload_too_large")["message"]
    assert time.monotonic() - began_s < 1


def test_half_a_character_is_explained(client: httpx.Client) -> None:
    error = refused(client.post(CLASSIFY, content=b'{"input": "\\ud83d"}'), 400, "invalid_json")
    assert "send both halves, or the character itself" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000])
@pytest.mark.parametrize("field", ["temperature", "top_p", "seed", "steps", "max_tokens"])
def test_numbers_that_are_none(client: httpx.Client, field: str, number: str) -> None:
    body = f'{{"prompt": "To be", "{field}": {number}}}'
    response = client.post(GENERATE, content=body.encode())
    assert response.status_code in (400, 422), response.text
    error = response.json()["error"]
    assert error["param"] == field or "JSON" in error["message"]


@pytest.mark.parametrize("body", [b"[]", b"3", b'"text"', b"null", b"true"])
def test_json_that_is_no_object(client: httpx.Client, body: bytes) -> None:
    error = refused(client.post(CLASSIFY, content=body), 422, "invalid_field")
    assert "must be a JSON object" in error["message"]


def test_text_of_any_kind_is_classified(client: httpx.Client) -> None:
    for text in ("\x00", "\u200d", "👩‍👩‍👧", "\ufffd", " ", "\n" * 50, "<pad>", "a\u0301"):
        response = client.post(CLASSIFY, json={"input": text})
        assert response.status_code == 200, (text, response.text)


def test_any_content_type_is_read_as_json(client: httpx.Client) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; x=y"):
        headers = {"content-type": kind}
        response = client.post(CLASSIFY, content=json.dumps(TEXT), headers=headers)
        assert response.status_code == 200


def test_of_a_repeated_key_the_last_counts(client: httpx.Client) -> None:
    body = b'{"input": "x", "steps": 1, "steps": 2}'
    answer = client.post(CLASSIFY, content=body).json()
    assert answer["results"][0]["budget"]["steps"] == 2


def test_a_body_over_the_limit(client: httpx.Client) -> None:
    body = json.dumps({"input": "x" * 2**20}).encode()
    error = refused(client.post(CLASSIFY, content=body), 413, "payload_too_large")
    assert error["max_bytes"] == 2**20


def test_a_body_over_the_limit_in_chunks(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"input": "'
        for _ in range(40):
            yield b"x" * 2**15
        yield b'"}'

    refused(client.post(CLASSIFY, content=chunks()), 413, "payload_too_large")


def test_models_that_are_not_there(client: httpx.Client) -> None:
    for response in (
        client.post(CLASSIFY, json=TEXT | {"model": "nope"}),
        client.get("/v1/models/nope"),
        client.get("/v1/models/nope/ladder"),
        client.get("/v1/models/%ff%fe"),
    ):
        error = refused(response, 404, "unknown_model")
        assert error["models"] == ["tiny-classify", "tiny-generate"]
        assert "tiny-classify, tiny-generate" in error["message"]


def test_models_of_the_other_task(client: httpx.Client) -> None:
    error = refused(
        client.post(CLASSIFY, json=TEXT | {"model": "tiny-generate"}), 422, "wrong_task"
    )
    assert error["endpoint"] == GENERATE and GENERATE in error["message"]
    error = refused(
        client.post(GENERATE, json=PROMPT | {"model": "tiny-classify"}), 422, "wrong_task"
    )
    assert error["endpoint"] == CLASSIFY


def test_paths_and_methods_that_are_not_there(client: httpx.Client) -> None:
    refused(client.get("/v1/nothing"), 404, "not_found")
    refused(client.get("/static/nothing.js"), 404, "not_found")
    for method, path, allowed in (
        ("GET", CLASSIFY, "POST"),
        ("DELETE", GENERATE, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/health/live", "GET, HEAD"),
    ):
        response = client.request(method, path)
        error = refused(response, 405, "method_not_allowed")
        assert response.headers["allow"] == allowed and allowed in error["message"]


def test_the_server_is_as_well_as_before(client: httpx.Client) -> None:
    assert client.get("/health/ready").status_code == 200
    metrics = client.get("/metrics").text
    assert 'code="5' not in metrics
    assert "stepdial_in_flight 0.0" in metrics and "stepdial_queue_depth 0.0" in metrics
