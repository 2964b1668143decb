"""POST /v1/chat/completions, driven by the official client against the real process."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from serve.api import openai as shapes
from serve.bundle import open_staging, seal_bundle
from tests.fixtures.tiny_bundles import restage
from tests.fixtures.tiny_folders import generate_bundle
from tests.openai_clients import async_client, generated, read_chunks, sync_client
from tests.server_process import ServerProcess, server_process

PLAIN, TEMPLATED = "tiny-generate", "tiny-chat"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "?"}]},
]
TEMPLATE = (
    "{% for message in messages %}\n"
    "{% if message.role == 'assistant' %}{{ raise_exception('only questions') }}{% endif %}\n"
    "({{ message.role }} {{ message.content }})\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}(assistant {% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    templated = tmp_path_factory.mktemp("chat") / TEMPLATED
    add_template(templated, TEMPLATE)
    with server_process([generate_bundle().folder, templated]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with sync_client(server) as connected:
        yield connected


def add_template(folder: Path, template: str) -> None:
    """A bundle that is the tiny generator with a chat template."""
    plain = generate_bundle()
    file = "chat_template.jinja"
    tokenizer = replace(plain.manifest.text_tokenizer, chat_template=file)
    with open_staging(folder) as staging:
        restage(plain, staging)
        (staging / file).write_text(template, encoding="utf-8")
        manifest = replace(plain.manifest, name=folder.name, tokenizer=tokenizer)
        seal_bundle(staging, manifest, folder)


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        (PLAIN, "System: Be brief.\n\nUser: Who ?\n\nAssistant:"),
        (TEMPLATED, "(system Be brief.)\n(user Who ?)\n(assistant "),
    ],
)
def test_messages_become_a_prompt(
    client: OpenAI, raw: httpx.Client, model: str, prompt: str
) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, seed=3, max_completion_tokens=10, extra_body={"steps": 2}
    )
    same = generated(raw, prompt=prompt, seed=3, max_tokens=10, steps=2)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", same["text"])
    assert choice.finish_reason == same["finish_reason"] == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert answer.model_extra is not None
    assert answer.model_extra["stepdial"]["budget"] == same["budget"]
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


def test_a_chat_goes_on(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Who?"}]
    first = client.chat.completions.create(model=PLAIN, messages=messages, max_tokens=8)
    messages += [first.choices[0].message, {"role": "user", "content": "And why?", "name": "Ann"}]
    second = client.chat.completions.create(model=PLAIN, messages=messages, max_tokens=8)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 8


def test_an_answer_of_another_server_may_be_sent_back(raw: httpx.Client) -> None:
    """Others have empty lists where this one has null."""
    plain: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Me."},
        {"role": "user", "content": "Who ?"},
    ]
    full: dict[str, Any] = plain[0] | {
        "refusal": None,
        "annotations": [],
        "tool_calls": [],
        "audio": None,
        "parsed": None,  # of this client's own parse()
        "reasoning_content": None,
    }
    texts = set()
    for messages in (plain, [full, plain[1]]):
        body = {"model": PLAIN, "messages": messages, "max_tokens": 8, "seed": 1}
        response = raw.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        texts.add(response.json()["choices"][0]["message"]["content"])
    assert len(texts) == 1


def test_the_default_is_128_tokens(raw: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Who?"}]}
    answer = raw.post("/v1/chat/completions", json=body).json()
    shapes.ChatResponse.model_validate(answer, strict=True)
    assert answer["usage"]["completion_tokens"] == 128


def test_log_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=PLAIN, messages=MESSAGES, seed=1, n=2, max_tokens=5, logprobs=True, top_logprobs=20
    )
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
        for one in choice.logprobs.content:
            assert one.bytes == [*one.token.encode()]
            assert len(one.top_logprobs) == 20
            assert one.top_logprobs[0].logprob >= one.logprob


@pytest.mark.parametrize("counts", [False, True])
def test_the_bytes_of_a_stream(raw: httpx.Client, counts: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 9,
        "seed": 5,
        "n": 2,
        "logprobs": True,
    }
    whole = raw.post("/v1/chat/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": counts}}
    chunks, ended = read_chunks(raw.post("/v1/chat/completions", json=body | options))
    assert ended == "done"
    for chunk in chunks:
        shapes.ChatChunk.model_validate(chunk, strict=True)
        assert ("usage" in chunk) == counts
    assert ["stepdial" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    for choice in whole["choices"]:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == choice["finish_reason"]
        between = own[1:-1]
        assert all(set(piece["delta"]) == {"content"} for piece in between)
        text = "".join(piece["delta"]["content"] for piece in between)
        assert text == choice["message"]["content"]
        scores = [token for piece in between for token in piece["logprobs"]["content"]]
        assert scores == choice["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in own[:-1]] == [None] * (len(own) - 1)
    if counts:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


def test_the_client_puts_a_stream_together(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": TEMPLATED, "messages": MESSAGES, "seed": 2, "max_tokens": 12}
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert text is not None
    with client.chat.completions.stream(**asked, stop=text[6:9]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[6:9])]
    assert final.choices[0].finish_reason == "stop"


def test_the_asynchronous_client(server: ServerProcess) -> None:
    async def ask() -> tuple[str, str | None]:
        async with async_client(server) as client:
            asked: dict[str, Any] = {"model": PLAIN, "messages": MESSAGES, "seed": 2}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(pieces), whole.choices[0].message.content

    streamed, whole = asyncio.run(ask())
    assert streamed == whole


def test_what_a_template_does_not_take(raw: httpx.Client) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    body = {"model": TEMPLATED, "messages": messages}
    response = raw.post("/v1/chat/completions", json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "messages"
    assert response.json()["error"]["message"].endswith("does not take them: only questions")


def test_fields_that_change_nothing_are_taken(raw: httpx.Client) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "min_p": 0,
        "repetition_penalty": 1.0,
        "store": False,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "prompt_cache_options": {"ttl": "30m"},
        "prompt_cache_retention": "24h",
        "user": "u",
        "stop": None,
        "n": None,
        "stream": None,
        "top_logprobs": None,
        "max_tokens": 3,
    }
    body = {"messages": [{"role": "user", "content": "Who?"}], **neutral}
    response = raw.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
