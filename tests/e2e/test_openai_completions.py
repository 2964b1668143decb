"""POST /v1/completions and /v1/models, driven by the official client against the real process."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from serve.api import openai as shapes
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, translate_bundle
from tests.openai_clients import async_client, generated, read_chunks, sync_client
from tests.server_process import ServerProcess, server_process

MODEL, PROMPT = "tiny-generate", "To be"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    bundles = (classify_bundle(), generate_bundle(), translate_bundle())
    with server_process([bundle.folder for bundle in bundles]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with sync_client(server) as connected:
        yield connected


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [
        "tiny-classify",
        MODEL,
        "tiny-translate",
    ]
    one = client.models.retrieve(MODEL)
    assert (one.id, one.object, one.owned_by) == (MODEL, "model", "stepdial")


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_answer_is_that_of_generate(client: OpenAI, raw: httpx.Client, steps: int) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=20,
        seed=7,
        temperature=0.8,
        top_p=0.9,
        extra_body={"steps": steps, "top_k": 20},
    )
    same = generated(
        raw,
        prompt=PROMPT,
        max_tokens=20,
        seed=7,
        temperature=0.8,
        top_p=0.9,
        steps=steps,
        top_k=20,
    )
    (choice,) = answer.choices
    assert choice.text == same["text"] and choice.finish_reason == same["finish_reason"]
    assert answer.usage is not None and answer.usage.model_dump(exclude_unset=True) == same["usage"]
    assert answer.model_extra is not None
    dial = answer.model_extra["stepdial"]
    assert dial["budget"] == same["budget"] and dial["seed"] == 7
    assert set(dial) == {"budget", "timing", "seed"} and set(dial["timing"]) == set(same["timing"])
    assert answer.id == f"cmpl-{answer._request_id}" and answer.object == "text_completion"


def test_the_default_is_16_tokens_and_the_drawn_seed_gives_the_answer_again(
    raw: httpx.Client,
) -> None:
    first = raw.post("/v1/completions", json={"prompt": PROMPT}).json()
    shapes.CompletionResponse.model_validate(first, strict=True)
    assert first["usage"]["completion_tokens"] == 16
    seed = first["stepdial"]["seed"]
    again = raw.post("/v1/completions", json={"prompt": PROMPT, "seed": seed}).json()
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize(
    ("word", "steps"),
    [("none", 1), ("minimal", 1), ("low", 1), ("medium", 2), ("high", 4), ("xhigh", 4), ("max", 4)],
)
def test_reasoning_effort_names_a_rung(raw: httpx.Client, word: str, steps: int) -> None:
    body = {"prompt": PROMPT, "reasoning_effort": word, "max_tokens": 2}
    budget = raw.post("/v1/completions", json=body).json()["stepdial"]["budget"]
    assert (budget["steps"], budget["reason"]) == (steps, "effort")


def test_a_deadline_chooses_the_steps(raw: httpx.Client) -> None:
    body = {"prompt": PROMPT, "deadline_ms": 60_000, "max_steps": 2, "n": 3}
    budget = raw.post("/v1/completions", json=body).json()["stepdial"]["budget"]
    assert (budget["steps"], budget["reason"]) == (2, "deadline")


def test_several_answers_to_several_prompts(client: OpenAI, raw: httpx.Client) -> None:
    prompts = [PROMPT, "Once"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=5, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [
        generated(raw, prompt=prompt, seed=seed, max_tokens=12)
        for prompt in prompts
        for seed in (5, 6)
    ]
    assert [choice.text for choice in answer.choices] == [one["text"] for one in alone]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("".join(prompts))
    assert answer.usage.completion_tokens == 4 * 12
    assert answer.model_extra is not None
    work = answer.model_extra["stepdial"]["choices"]
    assert [(one["index"], one["seed"]) for one in work] == [(0, 5), (1, 6), (2, 5), (3, 6)]


def test_seeds_follow_each_other_around_the_end(raw: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n": 2, "seed": 2**63 - 1, "max_tokens": 2}
    dial = raw.post("/v1/completions", json=body).json()["stepdial"]
    assert [one["seed"] for one in dial["choices"]] == [2**63 - 1, 0]


def test_the_same_prompt_several_times_gives_several_answers(raw: httpx.Client) -> None:
    body = {"prompt": [PROMPT] * 20, "max_tokens": 12}
    answer = raw.post("/v1/completions", json=body).json()
    assert len({choice["text"] for choice in answer["choices"]}) > 15
    seeds = [one["seed"] for one in answer["stepdial"]["choices"]]
    assert len({*seeds}) == 20
    again = body | {"prompt": PROMPT, "seed": seeds[7]}
    found = raw.post("/v1/completions", json=again).json()["choices"][0]["text"]
    assert found == answer["choices"][7]["text"]


def test_values_that_other_servers_take_mean_what_they_mean_there(raw: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3}

    def text(**fields: Any) -> str:
        answer = raw.post("/v1/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text(top_k=-1) == text(top_k=0) == text()
    assert text(top_p=0) == text(temperature=0)
    assert text(seed=-1) == text(seed=2**63 - 1)


def test_the_best_of_several_are_the_likeliest_a_token(client: OpenAI, raw: httpx.Client) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, n=2, best_of=5, seed=3, max_tokens=9, logprobs=0
    )
    written = [
        generated(raw, prompt=PROMPT, seed=seed, max_tokens=9, logprobs=0) for seed in range(3, 8)
    ]
    means = {one["text"]: sum(token["logprob"] for token in one["logprobs"]) / 9 for one in written}
    best = sorted(means, key=lambda text: -means[text])[:2]
    assert [choice.text for choice in answer.choices] == best
    assert answer.usage is not None and answer.usage.completion_tokens == 5 * 9
    quiet = client.completions.create(
        model=MODEL, prompt=PROMPT, n=2, best_of=5, seed=3, max_tokens=9
    )
    assert [choice.text for choice in quiet.choices] == best
    assert all(choice.logprobs is None for choice in quiet.choices)


def test_log_probabilities_in_their_older_shape(client: OpenAI, raw: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "seed": 2, "logprobs": 2}
    (choice,) = client.completions.create(model=MODEL, **body).choices
    same = generated(raw, **body)["logprobs"]
    found = choice.logprobs
    assert found is not None and found.top_logprobs is not None
    assert found.tokens == [token["token"] for token in same]
    assert found.token_logprobs == [token["logprob"] for token in same]
    for token, top in zip(same, found.top_logprobs, strict=True):
        likely = {one["token"]: one["logprob"] for one in token["top"]}
        assert top == likely | {token["token"]: token["logprob"]}
    assert found.text_offset == list(range(8)) and "".join(found.tokens) == choice.text


def test_tokens_stand_for_their_text(client: OpenAI, raw: httpx.Client) -> None:
    tokens = [10, 20, 30]
    (choice,) = client.completions.create(
        model=MODEL, prompt=[tokens, tokens[:1]], seed=1, echo=True, max_tokens=4
    ).choices[:1]
    text = choice.text[:3]
    assert choice.text[3:] == generated(raw, prompt=text, seed=1, max_tokens=4)["text"]
    single = client.completions.create(model=MODEL, prompt=tokens, seed=1, max_tokens=4)
    assert single.choices[0].text == choice.text[3:]


def test_echo_puts_the_prompt_before_the_answer(client: OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, seed=1, n=2)
    echoed = client.completions.create(model=MODEL, prompt=PROMPT, seed=1, n=2, echo=True)
    assert [one.text for one in echoed.choices] == [PROMPT + one.text for one in plain.choices]
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, seed=1, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_a_stop_string_ends_the_answer(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0)
    stop = whole.choices[0].text[10:13]
    stopped = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0, stop=[stop], logprobs=0
    )
    (choice,) = stopped.choices
    assert choice.text == whole.choices[0].text[: whole.choices[0].text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[-1] >= len(choice.text)


def test_a_translator_translates(client: OpenAI, raw: httpx.Client) -> None:
    answer = client.completions.create(model="tiny-translate", prompt="hello", max_tokens=8)
    same = generated(raw, model="tiny-translate", prompt="hello", max_tokens=8)
    assert answer.choices[0].text == same["text"]


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("answers", [1, 3])
def test_the_bytes_of_a_stream(raw: httpx.Client, answers: int, counts: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "n": answers, "logprobs": 1}
    whole = raw.post("/v1/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": counts}}
    response = raw.post("/v1/completions", json=body | options)
    assert response.headers["server-timing"].startswith("queue;dur=")
    chunks, ended = read_chunks(response)
    assert ended == "done"
    for chunk in chunks:
        shapes.CompletionChunk.model_validate(chunk, strict=True)
        assert ("usage" in chunk) == counts
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
    assert ["stepdial" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    if counts:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["stepdial"]["budget"] == whole["stepdial"]["budget"]
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    assert len(pieces) == len(chunks) - counts
    for choice in whole["choices"]:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        tokens = [token for piece in own[:-1] for token in piece["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
        reasons = [piece["finish_reason"] for piece in own]
        assert reasons == [None] * 12 + [choice["finish_reason"]]


def test_the_client_reads_a_stream_while_it_is_made(client: OpenAI) -> None:
    with client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, seed=4, stream=True
    ) as stream:
        chunks = list(stream)
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, seed=4)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["stepdial"]["seed"] == 4


def test_many_at_once_from_one_event_loop(server: ServerProcess) -> None:
    async def ask(count: int) -> list[str]:
        async with async_client(server) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model=MODEL, prompt=PROMPT, seed=seed, max_tokens=10)
                    for seed in range(count)
                )
            )
            streamed = ""
            stream = await client.completions.create(
                model=MODEL, prompt=PROMPT, seed=0, max_tokens=10, stream=True
            )
            async for chunk in stream:
                streamed += chunk.choices[0].text
        return [answer.choices[0].text for answer in answers] + [streamed]

    texts = asyncio.run(ask(8))
    assert texts[-1] == texts[0] and len(set(texts)) > 4
