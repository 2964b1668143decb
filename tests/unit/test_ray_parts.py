"""What Stepdial on Ray decides by itself: where requests go, how many replicas there should be."""

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing Ray warns of Ray itself
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from ray.exceptions import RayActorError
from ray.serve.schema import ServeDeploySchema
from starlette.requests import Request
from starlette.responses import Response

from deploy.ray.arguments import Arguments, catalog_of
from deploy.ray.choice import Choice, choice_of
from deploy.ray.exchange import Asked, Head, Piece, Whole, exchanged, whole_of
from deploy.ray.front import Front
from deploy.ray.gathered import one_page
from deploy.ray.losses import lost_stream
from deploy.ray.routing import ranked
from deploy.ray.scaling import Load, Wanted, load_of
from deploy.ray.shelf import Shelf, card_of
from serve.errors import ModelGone, UnknownModel
from serve.metrics import Metrics
from serve.wire.departure import DEPARTURE_KEY
from serve.wire.envelope import WHOLE_KEY
from tests.sse import parse_events
from tests.tiny_folders import classify_bundle, generate_bundle, points_bundle, translate_bundle

ROOT = Path(__file__).parents[2]
CARDS = [
    card_of(make()) for make in (generate_bundle, classify_bundle, points_bundle, translate_bundle)
]
WANTED = Wanted(queue_depth=4, attainment=0.99, busy=0.7)


def test_the_config_is_one_that_serve_takes_and_its_arguments_are_ours() -> None:
    config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
    application = ServeDeploySchema.model_validate(config).applications[0]
    arguments = Arguments.model_validate(application.args)
    assert arguments.read_settings().threads == arguments.cpus
    with pytest.raises(ValidationError, match="at least min_replicas"):
        Arguments(min_replicas=5)
    with pytest.raises(ValidationError, match="admin_keys_file means nothing"):
        Arguments(settings={"admin_keys_file": "keys.toml"})


@pytest.mark.parametrize(
    ("method", "path", "body", "model"),
    [
        ("POST", "/v1/classify", {"input": "a film"}, "tiny-classify"),
        ("POST", "/v1/classify", {"input": [{"points": [[0, 0, 0]]}]}, "tiny-points"),
        ("POST", "/v1/classify", {"input": "a film", "model": "tiny-generate"}, None),
        ("POST", "/v1/classify", {"input": "a film", "model": "none"}, None),
        ("POST", "/v1/classify", [], None),
        ("POST", "/v1/generate", {"prompt": "a"}, "tiny-generate"),
        ("POST", "/v1/generate", {"prompt": "a", "num_beams": 2}, "tiny-translate"),
        ("POST", "/v1/chat/completions", {"model": "tiny-generate"}, "tiny-generate"),
        ("POST", "/v2/models/tiny-points/infer", {}, "tiny-points"),
        ("GET", "/v2/models/tiny-points", {}, None),
        ("GET", "/v1/models/tiny-points/ladder", {}, "tiny-points"),
        ("GET", "/v1/models", {}, None),
    ],
)
def test_a_request_names_its_model_as_the_routes_would(
    method: str, path: str, body: Any, model: str | None
) -> None:
    catalog = catalog_of(CARDS)
    assert choice_of(catalog, method, path, json.dumps(body).encode()).model == model
    assert choice_of(catalog, method, path, b"{").model in (None, model)


def test_a_request_for_a_stream_is_told_from_others() -> None:
    def streams(path: str, body: Any) -> bool:
        return choice_of(catalog_of(CARDS), "POST", path, json.dumps(body).encode()).streams

    assert streams("/v1/generate", {"stream": True})
    assert streams("/v1/chat/completions", {"stream": True, "model": "none"})
    assert not streams("/v1/completions", {"stream": False})
    assert not streams("/v1/classify", {"input": "stream"})
    assert choice_of(catalog_of(CARDS), "POST", "/v1/generate", b"[1") == Choice(None)


def test_requests_stay_with_their_model_until_its_replicas_are_much_busier() -> None:
    def best(*loads: tuple[int, set[str]]) -> int:
        return ranked(loads, "a", spill_requests=4)[0]

    assert best((4, {"a"}), (1, {"b"}), (3, {"a", "b"})) == 2
    assert best((3, {"a"}), (0, {"b"})) == 0
    assert best((5, {"a"}), (0, {"b"})) == 1
    assert best((1, {"b", "c"}), (1, {"b"})) == 1
    assert {ranked([(0, {"a"}), (0, {"a"})], "a", 4)[0] for _ in range(64)} == {0, 1}
    assert ranked([(2, set()), (1, {"b"})], "", 4) == [1, 0]


@pytest.mark.parametrize(
    ("load", "running", "target", "wanted"),
    [
        (Load(waiting=0, busy=2, met=None), 2, 2, 2),
        (Load(waiting=9, busy=2, met=1.0), 2, 2, 3),
        (Load(waiting=33, busy=2, met=None), 2, 2, 9),
        (Load(waiting=0, busy=2, met=0.9), 2, 2, 3),
        (Load(waiting=0, busy=2, met=0.9), 2, 3, 3),  # one is coming: wait for it
        (Load(waiting=9, busy=2, met=0.9), 2, 5, 5),
        (Load(waiting=0, busy=1.3, met=1.0), 3, 3, 2),
        (Load(waiting=0, busy=1.5, met=1.0), 3, 3, 3),
        (Load(waiting=0, busy=0, met=None), 1, 1, 1),
    ],
)
def test_replicas_follow_the_queue_and_the_deadlines(
    load: Load, running: int, target: int, wanted: int
) -> None:
    assert WANTED.replicas(load, running, target) == wanted


def test_what_replicas_tell_is_added_up() -> None:
    class Point:
        def __init__(self, value: float) -> None:
            self.value = value

    def series(*values: float) -> list[Point]:
        return [Point(value) for value in values]

    means = {"waiting": {"r": 2.0, "s": 1.5}, "busy": {"r": 1.0, "s": 0.25}}
    counts = {
        "deadlines": {"r": series(10, 30, 50), "s": series(0, 10), "t": []},
        "missed": {"r": series(3, 4), "s": series(0, 0)},
    }
    assert load_of(means, counts) == Load(waiting=3.5, busy=1.25, met=1 - 1 / 50)
    assert load_of(means, {}) == Load(waiting=3.5, busy=1.25, met=None)
    assert load_of({}, {}) is None


def test_a_shelf_lists_what_it_does_not_hold() -> None:
    shelf = Shelf()
    shelf.stock(CARDS)
    assert [served.name for served in shelf] == [card.name for card in CARDS]
    assert shelf.get("tiny-points") is None
    assert shelf.find("tiny-points").manifest.task == "classify"
    with pytest.raises(ModelGone, match="tiny-classify has just left"):
        shelf.pick(None, ("classify",))
    with pytest.raises(UnknownModel, match="tiny-generate, tiny-classify"):
        shelf.find("none")


def test_metrics_of_replicas_are_told_apart() -> None:
    metrics = Metrics()
    metrics.cancelled.inc(2)
    page = metrics.exposition().decode()
    merged = one_page({"r": page, "s": page}).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    samples = families["stepdial_cancelled"].samples
    assert [(one.name, one.labels, one.value) for one in samples] == [
        ("stepdial_cancelled_total", {"replica": "r"}, 2),
        ("stepdial_cancelled_total", {"replica": "s"}, 2),
    ]


def test_a_lost_stream_ends_as_its_path_has_it() -> None:
    [(name, data)] = parse_events(lost_stream("/v1/generate").decode())
    assert name == "error" and data["error"]["code"] == "replica_lost"
    [(name, data)] = parse_events(lost_stream("/v1/chat/completions").decode())
    assert name == "message" and data["error"]["type"] == "server_error"


async def _endless(
    heard: list[str], scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]
) -> None:
    scope[DEPARTURE_KEY].watch(lambda: heard.append("gone"))
    assert (await receive())["body"] == b"x"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"1", "more_body": True})
    heard.append((await receive())["type"])


ASKED = Asked("POST", "http", "/v1/classify", b"/v1/classify", b"", (), None, b"x")


def test_whoever_leaves_an_exchange_is_noticed_by_the_application() -> None:
    heard: list[str] = []

    async def leave_a_stream() -> list[Any]:
        exchange = exchanged(partial(_endless, heard), ASKED)
        first = await anext(aiter(exchange))
        await exchange.aclose()
        return first

    async def leave_a_whole_answer() -> None:
        waiting = asyncio.create_task(whole_of(partial(_endless, heard), ASKED))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert asyncio.run(leave_a_stream()) == [Head(200, ((b"a", b"b"),)), Piece(b"1", False)]
    asyncio.run(leave_a_whole_answer())
    assert heard == 2 * ["gone", "http.disconnect"]


def test_a_whole_answer_comes_as_one_however_it_is_sent() -> None:
    async def in_pieces(scope: Any, receive: Any, send: Callable[..., Any]) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        assert scope[WHOLE_KEY](201, [(b"a", b"b")], (), b"12")

    for app in (in_pieces, at_once):
        assert asyncio.run(whole_of(app, ASKED)) == Whole(Head(201, ((b"a", b"b"),)), b"12")


class Calls:
    """Stands for a handle of the engines: calls of it end in turn as they are told."""

    def __init__(self, *ends: Whole | Exception) -> None:
        self.asked: list[str] = []
        self.cancelled = 0
        self._ends = [*ends]

    def options(self, **chosen: Any) -> "Calls":
        self.asked += [chosen["method_name"]] if "method_name" in chosen else []
        return self

    def remote(self, asked: Asked) -> "Calls":
        return self

    def __await__(self) -> Generator[Any, None, Whole]:
        if not self._ends:
            yield from asyncio.sleep(60).__await__()
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def cancel(self) -> None:
        self.cancelled += 1


class _Front(Front):
    def __del__(self) -> None:  # type: ignore[override]  # the other is awaited
        """Only Ray Serve awaits the other."""


async def _answered(calls: Calls, leave_after_s: float | None = None) -> Response:
    arguments = Arguments(bundles=(classify_bundle().folder,), replica_host="127.0.0.1")
    front = object.__new__(_Front)
    await front.__init__(calls, arguments)  # type: ignore[misc]  # as Serve does

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"input": "a film"}).encode()}

    async with asyncio.timeout(leave_after_s):
        return await front(Request(ASKED.scope(), receive))


def test_a_whole_answer_is_one_call_which_another_replica_takes_over() -> None:
    there = Whole(Head(200, ((b"x-request-id", b"theirs"), (b"a", b"b"))), b"{}")
    calls = Calls(RayActorError(), there)
    answer = asyncio.run(_answered(calls))
    assert (answer.status_code, answer.body, calls.asked) == (200, b"{}", ["whole"])
    assert answer.raw_headers == [(b"a", b"b")]  # Serve's proxy adds the id
    lost = asyncio.run(_answered(Calls(*(RayActorError() for _ in range(4)))))
    assert json.loads(bytes(lost.body))["error"]["code"] == "replica_lost"
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")


def test_the_replica_is_told_when_nobody_waits_for_a_whole_answer() -> None:
    calls = Calls()
    with pytest.raises(TimeoutError):
        asyncio.run(_answered(calls, leave_after_s=0.05))
    assert calls.cancelled == 1
