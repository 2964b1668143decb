"""Every stream ends with exactly one terminal event, and all that it sends is as documented.

Each endpoint that streams, with each way to end: well, by an error of every kind, or by a
connection that breaks, which clients must read as an error.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from serve.server import HUNG
from tests.fake_model import Mood
from tests.fake_server import FakeServer, fake_server
from tests.fixtures.tiny_folders import generate_bundle
from tests.hanging_graphs import POISON, pooling
from tests.openai_clients import parse_chunks, sync_client
from tests.server_process import server_process
from tests.sse import parse_events

Body = dict[str, Any]
ENDLESS = 1_000_000
REAL = ("--max-tokens", str(ENDLESS), "--threads", "1")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route that streams, and the names of what it sends in the OpenAPI document."""

    path: str
    asks: Body
    chunk: str
    done: str | None  # None: [DONE], which is no JSON
    error: str

    def body(self, max_tokens: int, **fields: Any) -> Body:
        return self.asks | {"max_tokens": max_tokens, "stream": True, "temperature": 0} | fields

    def end_of(self, text: str, document: Body) -> Body | None:
        """Of a whole stream: what is wrong, None if it ended well; every event is as documented."""
        if self.done is not None:
            *chunks, (name, last) = parse_events(text)
            assert {name for name, _ in chunks} <= {"message"}, text
            assert name in ("done", "error"), text
            pieces = [chunk for _, chunk in chunks]
            check(document, self.error if name == "error" else self.done, last)
            ended = last["error"] if name == "error" else None
        else:
            pieces, how = parse_chunks(text)
            ended = pieces[-1]["error"] if how == "error" else None
            if ended is not None:
                check(document, self.error, pieces.pop())
        assert pieces
        for piece in pieces:
            check(document, self.chunk, piece)
        return ended


MESSAGES = [{"role": "user", "content": "abc"}]
ENDPOINTS = (
    Endpoint("/v1/generate", {"prompt": "abc"}, "TokenChunk", "DoneChunk", "ErrorResponse"),
    Endpoint("/v1/completions", {"prompt": "abc"}, "CompletionChunk", None, "OpenAIError"),
    Endpoint("/v1/chat/completions", {"messages": MESSAGES}, "ChatChunk", None, "OpenAIError"),
)
endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.path)


def check(document: Body, schema: str, data: Body) -> None:
    """It is as the document says, and has no field that is not in there."""
    described = {"$ref": f"#/components/schemas/{schema}", "components": document["components"]}
    Draft202012Validator(described).validate(data)
    if schema not in ("ErrorResponse", "OpenAIError"):  # whose details depend on the code
        assert data.keys() <= document["components"]["schemas"][schema]["properties"].keys()


def document_of(url: str) -> Body:
    found: Body = httpx.get(f"{url}/openapi.json").json()
    return found


def streamed(url: str, endpoint: Endpoint, body: Body) -> str:
    response = httpx.post(f"{url}{endpoint.path}", json=body, timeout=30)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return response.text


def nothing(mood: Mood) -> None:
    """All goes well."""


def slow(mood: Mood) -> None:
    mood.fail = lambda kind, tokens: time.sleep(0.02)


def throwing(mood: Mood) -> None:
    calls = iter(range(10**9))

    def fail(kind: str, tokens: Any) -> None:
        if next(calls) == 3:
            raise RuntimeError("a detail of the runtime")

    mood.fail = fail


def hanging(mood: Mood) -> None:
    """The fourth call hangs until it is told to end."""
    calls = iter(range(10**9))
    mood.obeys = True

    def fail(kind: str, tokens: Any) -> None:
        if next(calls) == 2:
            mood.gate.clear()

    mood.fail = fail


@endpoints
@pytest.mark.parametrize(
    ("misbehave", "settings", "fields", "code"),
    [
        (nothing, {}, {}, None),
        (nothing, {}, {"logprobs": 2, "stream_options": {"include_usage": True}, "n": 2}, None),
        (slow, {}, {"deadline_ms": 300}, "deadline_lapsed"),
        (throwing, {}, {}, "model_failure"),
        (hanging, {"stall_s": 0.2, "stall_unknown_s": 0.2}, {}, "model_failure"),
    ],
    ids=("well", "all-fields", "deadline", "throws", "hangs"),
)
def test_a_stream_ends_once(
    endpoint: Endpoint,
    misbehave: Callable[[Mood], None],
    settings: Body,
    fields: Body,
    code: str | None,
) -> None:
    with fake_server(**settings) as server:
        document = document_of(server.url)
        misbehave(server.mood)
        body = endpoint.body(20 if code is None else 400, **known(endpoint, fields))
        ended = endpoint.end_of(streamed(server.url, endpoint, body), document)
        assert (ended and ended["code"]) == code
        server.mood.gate.set()
        server.wait_for()


def known(endpoint: Endpoint, fields: Body) -> Body:
    """Those of the fields that the endpoint has, as it has them."""
    if endpoint.done is not None:
        return {
            name: value for name, value in fields.items() if name in ("logprobs", "deadline_ms")
        }
    if endpoint.chunk == "ChatChunk" and "logprobs" in fields:
        return fields | {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return fields


@endpoints
def test_a_bug_of_ours_is_an_error_too(endpoint: Endpoint) -> None:
    with fake_server() as server:
        document = document_of(server.url)
        server.mood.fail = dying_after(server, 3)
        text = streamed(server.url, endpoint, endpoint.body(400))
        ended = endpoint.end_of(text, document)
        assert ended is not None and ended["code"] == "not_ready"


def dying_after(server: FakeServer, calls: int) -> Callable[[str, Any], None]:
    counted = iter(range(10**9))

    def fail(kind: str, tokens: Any) -> None:
        if next(counted) == calls:
            raise SystemExit("a bug of ours")

    return fail


class Reader:
    """One client that reads a stream of the real server on a thread."""

    def __init__(self, url: str, endpoint: Endpoint, pool: ThreadPoolExecutor) -> None:
        self.endpoint = endpoint
        self.flows = threading.Event()
        self.text: Future[str] = pool.submit(self._read, url)

    def _read(self, url: str) -> str:
        asked = self.endpoint.body(ENDLESS, steps=1)
        text = ""
        with httpx.stream("POST", url + self.endpoint.path, json=asked, timeout=30) as response:
            for piece in response.iter_text():
                text += piece
                self.flows.set()
        return text


@contextmanager
def readers(url: str) -> Iterator[list[Reader]]:
    """One client of each endpoint, to all of whom tokens come."""
    with ThreadPoolExecutor(2 * len(ENDPOINTS)) as pool:
        reading = [Reader(url, endpoint, pool) for endpoint in ENDPOINTS]
        for reader in reading:
            assert reader.flows.wait(10), reader.endpoint
        yield reading


def check_ends(reading: list[Reader], document: Body, code: str) -> None:
    for reader in reading:
        ended = reader.endpoint.end_of(reader.text.result(30), document)
        assert ended is not None and ended["code"] == code


def test_all_streams_end_when_the_grace_limit_of_a_signal_is_over() -> None:
    with server_process([generate_bundle().folder], "--drain-s", "0.3", *REAL) as server:
        document = document_of(server.url)
        with readers(server.url) as reading:
            server.terminate()
            check_ends(reading, document, "draining")
        assert server.wait() == 0


@pytest.mark.long
def test_all_streams_end_before_a_process_that_hangs_does(tmp_path: Path) -> None:
    folders = [pooling(tmp_path / "pooling").folder, generate_bundle().folder]
    with server_process(folders, "--stall-exit-s", "1", *REAL) as server:
        document = document_of(server.url)
        asked = {"input": POISON}
        with ThreadPoolExecutor() as pool, readers(server.url) as reading:
            poisoned = pool.submit(httpx.post, f"{server.url}/v1/classify", json=asked, timeout=30)
            check_ends(reading, document, "model_failure")
            assert poisoned.result().status_code == 503
        assert server.wait() == HUNG


def test_a_server_that_is_killed_is_an_error_to_every_client() -> None:
    with server_process([generate_bundle().folder], *REAL) as server:
        with readers(server.url) as reading, sync_client(server) as client:
            stream = client.completions.create(
                model="tiny-generate", prompt="abc", max_tokens=ENDLESS, stream=True
            )
            next(stream)
            server.process.kill()
            for reader in reading:
                with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                    reader.text.result(30)
            with pytest.raises(openai.APIConnectionError):
                list(stream)
        assert server.wait() != 0


def test_the_stream_that_is_read_is_the_stream_that_is_documented() -> None:
    """The document names the shapes that the tests above hold the streams against."""
    with fake_server() as running:
        paths = document_of(running.url)["paths"]
        for endpoint in ENDPOINTS:
            answer = paths[endpoint.path]["post"]["responses"]["200"]
            assert "text/event-stream" in answer["content"]
            for name in filter(None, (endpoint.chunk, endpoint.done, endpoint.error)):
                assert name in answer["description"]
