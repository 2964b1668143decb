"""Answers of the greatest size: limited, written piece by piece, and never long on the loop."""

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest

from serve.api.body import Budget, Expected, Timing, Usage
from serve.api.native import GenerateResponse
from serve.api.openai import (
    ChatFormat,
    ChatResponse,
    ChunkWriter,
    CompletionFormat,
    CompletionResponse,
    DialReport,
    Fields,
    ResponseFormat,
    Tail,
)
from serve.api.submission import (
    FEW_ENTRIES,
    PIECE_BYTES,
    EventQueue,
    EventStream,
    PiecewiseAnswer,
    TextEvent,
    answer_of,
    written,
)
from serve.app import create_app
from serve.engine.engine import Engine
from serve.engine.job import GeneratedEvent, ScoredToken, Span, TokenEvent
from serve.exchange import EXCHANGE_KEY, Exchange, ReadyAnswer
from serve.metrics import Metrics
from serve.settings import Settings
from tests.fake_model import Mood, fake_catalog
from tests.fake_server import fake_server
from tests.fixtures.tiny_folders import generate_bundle

HOLD_S = 0.05
SPAN = Span(1.0, 2.0, 3.0)
BUDGET = Budget(
    steps=1,
    method="euler",
    nfe=1,
    reason="exact",
    full_steps=1,
    expected=Expected(metric="loss", value=1.0, full_value=1.0),
)
TAIL = Tail(
    usage=Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3),
    stepdial=DialReport(budget=BUDGET, timing=Timing(queue_ms=1, compute_ms=1, total_ms=2), seed=0),
)


def head(kind: str) -> Fields:
    return {"id": "id-1", "object": kind, "created": 1, "model": "m"}


def whole_body(response_format: ResponseFormat, events: list[GeneratedEvent]) -> Fields:
    choices = response_format.choices(events)
    return {**head(response_format.whole_kind), "choices": choices, **TAIL}


def scored(tokens: int, alternatives: int) -> tuple[ScoredToken, ...]:
    top = tuple((f"t{number}", -1.5 - number) for number in range(alternatives))
    return tuple(ScoredToken("é\ufffd"[at % 2], -0.25, top, at) for at in range(tokens))


def ended(tokens: int, alternatives: int) -> GeneratedEvent:
    return GeneratedEvent("length", "text", tokens, scored(tokens, alternatives), SPAN)


async def post(app: Any, content: bytes, take: Callable[[bytes], object]) -> None:
    """Ask for a chat, and hand each part of the answer on: a client that takes no time itself."""
    left = asyncio.Event()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200, message
        take(message.get("body", b""))

    path = "/v1/chat/completions"
    headers = [(b"host", b"test"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    rest = {"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http"}
    ends = {"server": ("test", 80), "client": ("127.0.0.1", 9), "root_path": "", "state": {}}
    await app(scope | rest | ends, receive, send)
    left.set()


@contextmanager
def callbacks_timed() -> Iterator[list[float]]:
    """The processor time that each callback of an event loop takes.

    What the tests before have left in memory is not looked at, as in a server: the garbage
    collector would take the thread of the loop for it.
    """
    run, found = asyncio.Handle._run, list[float]()

    def run_timed(self: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(self)
        found.append(time.thread_time() - began_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", run_timed)
        gc.collect()
        gc.freeze()
        try:
            yield found
        finally:
            gc.unfreeze()


@pytest.mark.parametrize(
    ("response_format", "response"),
    [(ChatFormat(True), ChatResponse), (CompletionFormat(["> "] * 2, True), CompletionResponse)],
)
def test_a_whole_answer_has_the_documented_shape(
    response_format: ResponseFormat, response: Any
) -> None:
    events = [ended(3, 2), ended(200, 0)]
    text = b"".join(written(whole_body(response_format, events)))
    found = response.model_validate_json(text)
    assert found.model_dump_json() == text.decode()
    assert len(found.choices) == 2
    for choice, event in zip(found.choices, events, strict=True):
        scores = choice.logprobs
        places = scores.content if isinstance(response_format, ChatFormat) else scores.tokens
        assert len(places) == len(event.logprobs)


@pytest.mark.parametrize("value", [{}, [], {"a": []}, {"a": [{}, [1, "x"]], "b": None}])
def test_plain_values_are_written_as_json(value: Any) -> None:
    assert json.loads(b"".join(written(value))) == value


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_lists_are_written_item_by_item(count: int) -> None:
    text = b"".join(written({"some": ({"at": at} for at in range(count))}))
    assert json.loads(text) == {"some": [{"at": at} for at in range(count)]}


def test_small_answers_go_out_whole() -> None:
    assert isinstance(answer_of({"a": 1}, FEW_ENTRIES), ReadyAnswer)
    assert isinstance(answer_of({"a": 1}, FEW_ENTRIES + 1), PiecewiseAnswer)


def sent_by(response: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """What a response sends, and what that takes the loop."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        await response({"type": "http", EXCHANGE_KEY: Exchange()}, None, send)

    with callbacks_timed() as found:
        asyncio.run(run())
    return messages, found


def test_the_largest_answer_is_written_in_pieces_beside_the_loop() -> None:
    most = Settings().max_answer_tokens
    events = [ended(most // 16 // 21, 20) for _ in range(16)]
    answer = answer_of(whole_body(ChatFormat(True), events), most, (b"x-a", b"b"))
    (start, *bodies), found = sent_by(answer)
    assert (b"x-a", b"b") in start["headers"]
    assert b"content-length" not in dict(start["headers"])
    assert max(found) < HOLD_S
    pieces = [message["body"] for message in bodies]
    assert max(map(len, pieces)) < 3 * PIECE_BYTES and len(pieces) > 50
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    whole = ChatResponse.model_validate_json(b"".join(pieces))
    assert len(whole.choices) == 16


def test_a_stream_that_nobody_read_for_long_does_not_hold_the_loop() -> None:
    scores = scored(2, 20)
    tokens = [(0, TokenEvent(at, "x", scores[at % 2])) for at in range(4096)]

    def tail(events: Sequence[GeneratedEvent]) -> Tail:
        return TAIL

    chunk = head(ChatFormat.chunk_kind)
    writer = ChunkWriter(ChatFormat(True), chunk, 1, tail, "/v1/chat/completions", False)
    first: list[TextEvent] = [*tokens, (0, ended(1, 0))]
    stream = EventStream(1, first, EventQueue(), AsyncExitStack(), writer.write, {})
    messages, found = sent_by(stream)
    assert max(found) < HOLD_S
    events = b"".join(message.get("body", b"") for message in messages).split(b"\n\n")
    assert len(events) == 1 + 4096 + 1 + 1 + 1  # the role, the tokens, the end, [DONE], nothing


def test_the_largest_request_to_a_server_never_holds_its_loop_for_long() -> None:
    """Everything from the body to the last piece, with an engine that writes."""
    settings = Settings(max_tokens=100_000)
    engine = Engine(fake_catalog(Mood(), generate_bundle()), settings.limits, Metrics())
    tokens = settings.max_answer_tokens // 16 // 21
    content = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            **{"n": 16, "max_tokens": tokens, "logprobs": True, "top_logprobs": 20, "steps": 1},
        }
    ).encode()

    parts: list[bytes] = []

    async def run() -> None:
        app = create_app(settings, engine)
        async with app.router.lifespan_context(app):
            warm = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            await post(app, json.dumps(warm).encode(), parts.append)
            parts.clear()
            found.clear()
            await post(app, content, parts.append)

    with callbacks_timed() as found:
        asyncio.run(run())
    assert max(found) < HOLD_S
    whole = ChatResponse.model_validate_json(b"".join(parts))
    assert whole.usage.completion_tokens == 16 * tokens
    assert all(
        choice.logprobs and len(choice.logprobs.content[-1].top_logprobs) == 20
        for choice in whole.choices
    )


@pytest.mark.long
def test_the_memory_of_the_largest_answer_is_what_the_document_says() -> None:
    """At most 14 MiB (docs/security.md), and 2 for what else a server does meanwhile."""
    settings = Settings(max_tokens=100_000)
    engine = Engine(fake_catalog(Mood(), generate_bundle()), settings.limits, Metrics())
    tokens = settings.max_answer_tokens // 16 // 21
    asked = {"messages": [{"role": "user", "content": "hi"}], "n": 16, "steps": 1}
    scores = {"logprobs": True, "top_logprobs": 20}
    sent = 0

    def body_of(**more: Any) -> bytes:
        return json.dumps(asked | more).encode()

    def take(part: bytes) -> None:
        nonlocal sent
        sent += len(part)

    async def run() -> int:
        nonlocal sent
        app = create_app(settings, engine)
        async with app.router.lifespan_context(app):
            await post(app, body_of(max_tokens=2, **scores), take)
            sent = 0
            tracemalloc.start()
            await post(app, body_of(max_tokens=tokens, **scores), take)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

    peak = asyncio.run(run())
    assert sent > 4 << 20, "the answer itself is larger than what is kept of it"
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                **{"n": 16, "max_completion_tokens": 4096, "logprobs": True, "top_logprobs": 20},
            },
            "1376256 tokens, 16 texts x 4096 tokens x 21 with the logprobs of each, but an answer "
            "of this server has at most 131072: lower max_completion_tokens or the number of texts "
            "or the number of logprobs",
        ),
        (
            "/v1/completions",
            {"prompt": ["a"] * 8, "best_of": 2, "max_tokens": 4096, "logprobs": 5},
            "393216 tokens",
        ),
        ("/v1/completions", {"prompt": "a", "stream": True, "n": 16, "max_tokens": 4096,
          "logprobs": 5}, "393216 tokens"),
        (
            "/v2/models/tiny-generate/infer",
            {
                "inputs": [
                    {"name": "text", "datatype": "BYTES", "shape": [64], "data": ["a"] * 64}
                ],
                "parameters": {"max_tokens": 4096},
            },
            "262144 tokens",
        ),
    ],
)  # fmt: skip
def test_answers_beyond_the_limit_are_refused(path: str, body: Any, says: str) -> None:
    with fake_server() as server:
        response = httpx.post(f"{server.url}{path}", json=body)
    assert response.status_code == (400 if path.startswith("/v2") else 422)
    assert says in response.text


def test_the_largest_of_one_text_fits_and_the_limit_can_be_set() -> None:
    body = {"prompt": "abc", "max_tokens": 40, "logprobs": 1}
    with fake_server(max_answer_tokens=80) as server:
        answer = httpx.post(f"{server.url}/v1/generate", json=body)
        GenerateResponse.model_validate_json(answer.content)
        assert answer.json()["usage"]["completion_tokens"] == 40
        refused = httpx.post(f"{server.url}/v1/generate", json=body | {"max_tokens": 41})
        assert refused.status_code == 422 and "lower max_tokens" in refused.text
