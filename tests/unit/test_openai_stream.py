"""Streams in OpenAI's shape that fail or come late: an error is their one terminal event."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from openai import OpenAI

from serve.api.body import Budget, Expected, Timing, Usage
from serve.api.native import AnswerWriter
from serve.api.openai import (
    ChunkWriter,
    CompletionFormat,
    CompletionResponse,
    DialReport,
    Fields,
    Tail,
)
from serve.api.submission import Submission, written
from serve.engine.job import (
    FailedEvent,
    GeneratedEvent,
    Limits,
    ScoredToken,
    Span,
    TokenEvent,
)
from serve.errors import InternalError
from tests.engine_bench import Bench, Caller
from tests.fake_model import Mood
from tests.fake_server import FakeServer, fake_server
from tests.openai_clients import parse_chunks

ABC: dict[str, Any] = {"model": "tiny-generate", "prompt": "abc", "max_tokens": 9, "stream": True}
SPAN = Span(1.0, 2.0, 3.0)
BUDGET = Budget(
    steps=1,
    method="euler",
    nfe=1,
    reason="exact",
    full_steps=1,
    expected=Expected(metric="loss", value=1.0, full_value=1.0),
)
HEAD: Fields = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
TAIL = Tail(
    usage=Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3),
    stepdial=DialReport(budget=BUDGET, timing=Timing(queue_ms=1, compute_ms=1, total_ms=2), seed=0),
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def writer(answers: int, counts: bool = False) -> ChunkWriter:
    response_format = CompletionFormat([""] * answers, logprobs=False)
    return ChunkWriter(
        response_format, HEAD, answers, lambda events: TAIL, "/v1/completions", counts
    )


def end(text: str) -> GeneratedEvent:
    return GeneratedEvent("stop", text, 1, (), SPAN)


def test_a_token_that_was_on_its_way_does_not_follow_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads end jobs between a call and the delivery of what it gave."""
    bench, caller = Bench(Mood(), Limits()), Caller()
    monkeypatch.setattr(bench.engine, "_check_works", lambda: None)  # its thread does not run
    job, _ = bench.generate("abc", 9, stream=True)
    job.work.deliver = caller.events.append
    post = bench.engine._post

    def interrupted(*what: Any) -> None:
        bench.engine._post = post
        bench.engine.abort(InternalError("too late"))
        post(*what)

    bench.engine._post = interrupted
    bench.engine.step()
    events = [(0, event) for event in caller.events]
    assert [type(event) for _, event in events] == [FailedEvent, TokenEvent]
    native = AnswerWriter(cast(Submission, SimpleNamespace(decision=SimpleNamespace(steps=2))))
    for body in (native.events(events), writer(1).write(events)):
        assert b"too late" in body and body.count(b"data:") == 1


def test_a_call_that_throws_ends_the_stream_of_all_answers(server: FakeServer) -> None:
    decoded = 0

    def fail(kind: str, _: object) -> None:
        nonlocal decoded
        decoded += kind == "decode"
        if decoded > 3:
            raise RuntimeError("out of memory")

    server.mood.fail = fail
    response = httpx.post(f"{server.url}/v1/completions", json=ABC | {"n": 3, "temperature": 0})
    chunks, ended = parse_chunks(response.text)
    assert ended == "error"
    error = chunks[-1]["error"]
    assert (error["code"], error["type"]) == ("model_failure", "server_error")
    server.wait_for(running=0)


def test_a_deadline_that_lapses_in_a_stream_raises_in_the_client(server: FakeServer) -> None:
    def hold(kind: str, _: object) -> None:
        if kind == "decode":
            server.mood.gate.clear()

    server.mood.fail = hold
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        stream = client.completions.create(**ABC, n=2, extra_body={"deadline_ms": 300})
        assert next(stream).choices[0].text == "d"
        with pytest.raises(openai.APIError, match="within 300 ms") as caught:
            for _ in stream:
                pass
    assert caught.value.code == "deadline_lapsed" and caught.value.param == "deadline_ms"
    server.mood.fail = lambda kind, tokens: None
    server.mood.gate.set()
    server.wait_for(running=0)


def test_a_deadline_that_lapses_is_a_504(server: FakeServer) -> None:
    server.mood.gate.clear()
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(
            model="tiny-generate", prompt="abc", n=2, extra_body={"deadline_ms": 200}
        )
    assert caught.value.status_code == 504 and caught.value.code == "deadline_lapsed"
    server.mood.gate.set()
    server.wait_for(running=0)


def test_all_answers_get_a_place_in_the_queue_or_none() -> None:
    with fake_server(queue_limit=3) as server, ThreadPoolExecutor(3) as pool:

        def ask(answers: int) -> httpx.Response:
            body = ABC | {"n": answers, "stream": False}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)

        server.mood.gate.clear()
        asked = [pool.submit(ask, 1)]
        server.wait_for(running=1)
        asked.append(pool.submit(ask, 2))
        server.wait_for(running=1, queued=2)
        refused = ask(2)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        server.wait_for(running=1, queued=2)
        asked.append(pool.submit(ask, 1))
        server.wait_for(running=1, queued=3)
        server.mood.gate.set()
        assert [len(one.result().json()["choices"]) for one in asked] == [1, 2, 1]


@pytest.mark.parametrize("counts", [False, True])
def test_the_last_of_several_answers_ends_the_stream(counts: bool) -> None:
    written = writer(2, counts)
    first = written.write([(1, TokenEvent(0, "b")), (1, end("b"))])
    assert b"stepdial" not in first and b"[DONE]" not in first
    last = written.write([(0, TokenEvent(0, "a")), (0, end("a"))])
    assert last.endswith(b"\n\ndata: [DONE]\n\n")
    chunks, _ = parse_chunks((first + last).decode())
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * 4 + [0] * counts


def test_nothing_comes_behind_an_error() -> None:
    event = FailedEvent(InternalError("a bug"))
    written = writer(2).write([(0, TokenEvent(0, "a")), (0, event), (1, TokenEvent(0, "b"))])
    chunks, ended = parse_chunks(written.decode())
    assert ended == "error" and len(chunks) == 2


def test_of_tokens_that_look_alike_the_chosen_one_is_told_or_the_likeliest() -> None:
    half = ScoredToken("\ufffd", -3.0, (("\ufffd", -1.0), ("a", -1.5), ("a", -2.0)), 0)
    response_format = CompletionFormat([""], logprobs=True)
    event = GeneratedEvent("stop", "é", 1, (half,), SPAN)
    body = {**HEAD, "choices": response_format.choices([event]), **TAIL}
    whole = b"".join(written(body))
    (choice,) = CompletionResponse.model_validate_json(whole).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"\ufffd": -3.0, "a": -1.5}]
