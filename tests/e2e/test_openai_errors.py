"""What the official client raises, and when it tries again by itself, against the real process."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from serve.api.body import OpenAIError
from serve.api.openai import _named
from serve.errors import Unprocessable
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, translate_bundle
from tests.openai_clients import parse_chunks, sync_client
from tests.server_process import ServerProcess, server_process
from tests.waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "tiny-generate"
PROMPT: dict[str, Any] = {"prompt": "To be", "max_tokens": 2}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "To be", "max_tokens": 4096, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    bundles = (classify_bundle(), generate_bundle(), translate_bundle())
    with server_process([bundle.folder for bundle in bundles], "--max-tokens", "1000") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with sync_client(server) as connected:
        yield connected


def asks(number: int) -> dict[str, Any]:
    """A message of a chat that is not one."""
    return {"messages": [{"role": "user", "content": "?"}] * number}


@pytest.mark.parametrize(
    ("path", "changes", "param", "says"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt", "must be a string, or a list of tokens"),
        (COMPLETIONS, {"prompt": []}, "prompt", "send at least 1"),
        (COMPLETIONS, {"prompt": ["x"] * 33}, "prompt", "send at most 32"),
        (COMPLETIONS, {"prompt": ["x", ""]}, "prompt[1]", "is empty"),
        (COMPLETIONS, {"prompt": ["x", "naïve"]}, "prompt[1]", "'ï' (U+00EF) at index 2"),
        (COMPLETIONS, {"prompt": [3, "x"]}, "prompt[1]", "must be a token"),
        (COMPLETIONS, {"prompt": [[3, 0]]}, "prompt[0][1]", "is padding"),
        (COMPLETIONS, {"prompt": [3, 10**9]}, "prompt[1]", "is no token of tiny-generate"),
        (COMPLETIONS, {"n": 33}, "n", "at most 32"),
        (COMPLETIONS, {"prompt": ["x"] * 9, "n": 4}, "n", "asks for 36 texts"),
        (COMPLETIONS, {"prompt": ["x"] * 9, "best_of": 4}, "best_of", "asks for 36 texts"),
        (
            COMPLETIONS,
            {"reasoning_effort": "high", "max_disagreement": 0.1},
            "max_disagreement",
            "and reasoning_effort names them",
        ),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of", "send at least as many"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", "leave out one of them"),
        (COMPLETIONS, {"suffix": "end"}, "suffix", "not supported: the models here write forwards"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs", "at most 5"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "integer"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"max_tokens": 1001}, "max_tokens", "at most 1000"),
        (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty", "send 0"),
        (COMPLETIONS, {"presence_penalty": False}, "presence_penalty", "send 0"),
        (COMPLETIONS, {"frequency_penalty": -1}, "frequency_penalty", "send 0"),
        (COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
        (COMPLETIONS, {"min_p": 0.1}, "min_p", "send top_p"),
        (COMPLETIONS, {"repetition_penalty": 1.1}, "repetition_penalty", "send 1"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "naïve"}]},
            "messages[1].content",
            "'ï' (U+00EF) at index 2",
        ),
        (COMPLETIONS, {"stream_options": {}}, "stream_options", "send stream: true"),
        (
            COMPLETIONS,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "there are include_usage, include_obfuscation",
        ),
        (
            COMPLETIONS,
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "must be true or false",
        ),
        (COMPLETIONS, {"stream_options": 1}, "stream_options", "must be an object"),
        (COMPLETIONS, {"temprature": 1}, "temprature", "did you mean temperature?"),
        (COMPLETIONS, {"messages": []}, "messages", "unknown field"),
        (COMPLETIONS, {"steps": 3}, "steps", "1, 2, 4"),
        (COMPLETIONS, {"effort": "huge"}, "effort", "'low', 'medium', 'high' or 'max'"),
        (COMPLETIONS, {"reasoning_effort": "huge"}, "reasoning_effort", "'none', 'minimal'"),
        (COMPLETIONS, {"reasoning_effort": "low", "steps": 1}, "reasoning_effort", "send one"),
        (COMPLETIONS, {"max_disagreement": 0.1}, "max_disagreement", "steps or effort"),
        (COMPLETIONS, {"model": "tiny-classify"}, "model", "send it to /v1/classify"),
        (CHAT, {"model": "tiny-classify"}, "model", "send it to /v1/classify"),
        (CHAT, {"model": "tiny-translate"}, "model", "as prompt to /v1/completions"),
        (CHAT, {"messages": "hello"}, "messages", "must be a list"),
        (CHAT, {"messages": []}, "messages", "send at least 1"),
        (CHAT, asks(1025), "messages", "send at most 1024"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "no tools"),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            "messages[0].role",
            "no tools",
        ),
        (CHAT, {"metadata": {"a": 1}}, "metadata.a", "must be a string"),
        (CHAT, {"metadata": 1}, "metadata", "must be an object"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "system"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "must be one of"),
        (CHAT, {"messages": [{"role": "user", "contents": "x"}]}, "messages[0]", "'contents'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0]",
            "read text only",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "leave it out",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "ï"}]}, "messages[0].content", "U+00EF"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "call no tools"),
        (CHAT, {"functions": [{}]}, "functions", "call no tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "call no tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "send text"),
        (CHAT, {"modalities": ["audio"]}, "modalities", "write text only"),
        (CHAT, {"audio": {}}, "audio", "write text only"),
        (CHAT, {"store": True}, "store", "nothing is stored"),
        (CHAT, {"max_completion_tokens": 3}, "max_tokens", "send one of them"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 1001}, "max_completion_tokens", "at"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "send logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        (CHAT, {"prompt": "x"}, "prompt", "unknown field"),
    ],
)
def test_what_cannot_be_done_is_a_422_that_says_so(
    raw: httpx.Client, path: str, changes: dict[str, Any], param: str, says: str
) -> None:
    response = raw.post(path, json=(PROMPT if path == COMPLETIONS else HELLO) | changes)
    assert response.status_code == 422, response.text
    OpenAIError.model_validate(response.json(), strict=True)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert says in error["message"], error["message"]


def test_errors_name_the_field_that_was_sent() -> None:
    with pytest.raises(Unprocessable) as found, _named("max_tokens", "max_completion_tokens"):
        raise Unprocessable("lower max_tokens or steps", param="max_tokens")
    assert found.value.message == "lower max_completion_tokens or steps"
    assert found.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"prompt": "a" * 161}, "prompt", "161 tokens, but tiny-generate reads at most 160"),
        ({"prompt": ["a", "a" * 900_000]}, "prompt[1]", "900000 tokens, but tiny-generate reads"),
        ({"prompt": [3] * 161}, "prompt", "161 tokens, but tiny-generate reads at most 160"),
        ({"prompt": [3] * 161, "stream": True}, "prompt", "reads at most 160"),
        ({"prompt": [3] * (2**17 + 1)}, "prompt", "131073 tokens: send at most 131072"),
        ({"model": "tiny-translate", "prompt": "a " * 99}, "prompt", "translate it in parts"),
        ({"messages": asks(100)["messages"]}, "messages", "910 tokens, but tiny-generate reads"),
    ],
)
def test_a_prompt_that_is_too_long_is_the_error_that_clients_know(
    client: OpenAI, changes: dict[str, Any], param: str, said: str
) -> None:
    ask = {"model": MODEL, "max_tokens": 2} | changes
    create: Any = client.chat.completions if "messages" in ask else client.completions
    with pytest.raises(openai.BadRequestError) as caught:  # of which LangChain reads the text
        create.create(**ask)
    error = caught.value
    assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
    assert "context_length_exceeded" in str(error)
    assert error.param == param and said in error.message


@pytest.mark.parametrize(
    ("raised", "status", "ask"),
    [
        (openai.NotFoundError, 404, {"model": "nothing"}),
        (openai.UnprocessableEntityError, 422, {"model": "tiny-classify"}),
        (openai.UnprocessableEntityError, 422, {"extra_body": {"steps": 3}}),
        (openai.UnprocessableEntityError, 422, {"extra_body": {"stepz": 3}}),
        (openai.UnprocessableEntityError, 422, {"extra_body": {"deadline_ms": 0.001}}),
        (openai.PermissionDeniedError, 403, {"extra_headers": {"origin": "http://elsewhere"}}),
    ],
)
def test_the_client_raises_what_the_status_says(
    client: OpenAI, raised: type[openai.APIStatusError], status: int, ask: dict[str, Any]
) -> None:
    text: dict[str, Any] = {"model": MODEL, "prompt": "To be"} | ask
    chat: dict[str, Any] = {"model": MODEL, "messages": HELLO["messages"]} | ask
    calls: list[Callable[[], object]] = [
        lambda: client.completions.create(**text),
        lambda: client.completions.create(**text, stream=True),
        lambda: client.chat.completions.create(**chat),
    ]
    for call in calls:
        with pytest.raises(raised) as caught:
            call()
        error = caught.value
        assert error.status_code == status and error.request_id
        assert isinstance(error.body, dict) and len(error.body["message"]) > 10
        assert error.code == error.body["code"] and error.type


def test_a_body_that_is_not_json_is_a_bad_request(raw: httpx.Client) -> None:
    for path in (COMPLETIONS, CHAT):
        response = raw.post(path, content=b"{")
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_model_that_is_not_there(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing") as caught:
        client.models.retrieve("nothing")
    error = caught.value
    assert (error.code, error.type) == ("unknown_model", "invalid_request_error")
    assert error.param == "model"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny-generate", "/v1/models/x/ladder"])
def test_errors_about_models_are_of_its_shape(raw: httpx.Client, path: str) -> None:
    response = raw.delete(path)
    assert response.status_code in (404, 405)
    OpenAIError.model_validate(response.json(), strict=True)


def test_a_client_that_leaves_stops_all_its_answers(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as raw:
        body = ENDLESS | {"max_tokens": 1000, "n": 4}
        with raw.stream("POST", COMPLETIONS, json=body) as response:
            pieces = response.iter_raw()
            next(pieces)
            await_metric(raw, "stepdial_in_flight 4.0")
        await_metric(raw, "stepdial_in_flight 0.0")


def await_metric(raw: httpx.Client, line: str) -> None:
    """Until the metrics say so."""
    wait_until(lambda: line in raw.get("/metrics").text, f"no {line}")


def test_the_client_waits_for_a_place_by_itself() -> None:
    flags = ("--queue-limit", "1", "--decode-rows", "1")
    with (
        server_process([generate_bundle().folder], *flags) as server,
        httpx.Client(base_url=server.url, timeout=30) as raw,
        sync_client(server) as once,
        sync_client(server, max_retries=5) as patient,
        ThreadPoolExecutor(2) as pool,
    ):
        with raw.stream(
            "POST", COMPLETIONS, json=ENDLESS | {"max_tokens": 600, "steps": 4}
        ) as running:
            pieces = running.iter_raw()
            next(pieces)
            waiting = pool.submit(raw.post, COMPLETIONS, json=PROMPT | {"steps": 4})
            await_metric(raw, "stepdial_queue_depth 1.0")
            with pytest.raises(openai.RateLimitError) as caught:
                once.completions.create(model=MODEL, prompt="To be")
            create = patient.completions.with_raw_response.create
            asked = pool.submit(create, model=MODEL, prompt="To be", max_tokens=2)
            await_metric(raw, 'stepdial_rejected_total{reason="queue_full"} 2.0')
        assert caught.value.code == "queue_full" and caught.value.type == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after-ms"]) >= 1
        assert int(caught.value.response.headers["retry-after"]) >= 1
        response = asked.result(60)
        assert response.retries_taken >= 1
        assert response.parse().choices[0].finish_reason == "length"
        assert waiting.result(30).status_code == 200
        two = raw.post(COMPLETIONS, json=PROMPT | {"n": 2})
        assert two.status_code == 422 and "the queue of this server holds 1" in two.text


def test_the_end_of_a_server_is_an_error_in_its_streams() -> None:
    with (
        server_process([generate_bundle().folder], "--drain-s", "0.5") as server,
        sync_client(server) as client,
        httpx.Client(base_url=server.url, timeout=30) as raw,
        raw.stream("POST", COMPLETIONS, json=ENDLESS | {"n": 2}) as bytes_of_one,
    ):
        stream = client.completions.create(**ENDLESS)
        next(stream)
        text = bytes_of_one.iter_text()
        first = next(text)
        server.terminate()
        wait_until(lambda: raw.get("/health/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model=MODEL, prompt="To be")
        assert refused.value.code == "draining" and refused.value.type == "server_error"
        with pytest.raises(openai.APIError, match="send it again") as caught:
            for _ in stream:
                pass
        assert not isinstance(caught.value, openai.APIConnectionError)
        assert caught.value.code == "draining" and caught.value.type == "server_error"
        chunks, ended = parse_chunks(first + "".join(text))
        assert ended == "error" and "[DONE]" not in json.dumps(chunks)
        OpenAIError.model_validate(chunks[-1], strict=True)
        assert server.wait() == 0
