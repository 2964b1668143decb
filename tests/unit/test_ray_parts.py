"""What Stepdial on Ray decides by itself: where requests go, how many replicas there should be."""

import asyncio
import json
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing Ray warns of Ray itself
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from ray import serve
from ray.serve.schema import ServeDeploySchema
from starlette.types import Message, Receive, Scope, Send

from deploy.ray.app import Arguments, Replica, Shelf, one_page
from deploy.ray.local import arguments_of
from deploy.ray.routing import ranked
from deploy.ray.scaling import Load, Wanted, load_of
from serve.errors import BrokenBundle, ModelGone, NotReady, UnknownModel
from serve.exchange import EXCHANGE_KEY
from serve.keys import Keys
from serve.metrics import Metrics
from serve.middleware import RequestMiddleware
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, points_bundle

ROOT = Path(__file__).parents[2]
BUNDLES = [generate_bundle(), classify_bundle(), points_bundle()]
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
    with pytest.raises(ValidationError, match="access_log, health_port: no effect on Ray"):
        Arguments(settings={"health_port": 9000, "access_log": True, "queue_limit": 8})
    with pytest.raises(ValidationError, match="max_connections, port: no effect on Ray"):
        Arguments(settings={"port": 9000, "max_connections": 100, "max_body_bytes": 1000})
    with pytest.raises(ValueError, match="gpus would be reserved and not used"):
        Arguments(gpus=1).read_settings()
    assert Arguments(gpus=1, settings={"device": "cuda"}).read_settings().device == "cuda"
    same = Arguments(bundles=(BUNDLES[0].folder, BUNDLES[0].folder))
    with pytest.raises(ValueError, match="two bundles have the same name"):
        same.read_bundles(same.read_settings())


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
    shelf.stock(BUNDLES)
    assert [served.name for served in shelf] == [one.manifest.name for one in BUNDLES]
    assert shelf.get("tiny-points") is None
    assert shelf.find("tiny-points").manifest.task == "classify"
    with pytest.raises(ModelGone, match="serve_multiplexed_model_id: tiny-classify"):
        shelf.pick(None, ("classify",))
    with pytest.raises(UnknownModel, match="tiny-generate, tiny-classify, tiny-points"):
        shelf.find("none")


def test_a_replica_is_ready_by_the_models_that_it_holds() -> None:
    shelf = Shelf()
    shelf.stock(BUNDLES)
    engine = SimpleNamespace(catalog=shelf, failing=[], check_open=lambda: None)
    replica: Any = SimpleNamespace(_engine=engine)
    asyncio.run(Replica.check_health(replica))
    shelf.put(shelf.find("tiny-points"))
    engine.failing.append("tiny-points")
    with pytest.raises(NotReady, match="the last call of tiny-points failed"):
        asyncio.run(Replica.check_health(replica))
    shelf.put(shelf.find("tiny-classify"))
    asyncio.run(Replica.check_health(replica))


class Asked:
    """A replica without Ray: what it is asked, and what its loader and its routes see of it."""

    def __init__(self, keys: Keys, problem: Exception | None = None) -> None:
        self.loaded: list[str] = []
        self.waited_s: list[float] = []
        self._problem = problem
        plain = RequestMiddleware(self._routes, Metrics(), keys)
        replica: Any = SimpleNamespace(_folders={"tiny": Path("tiny")}, _hold=self._hold)
        holding = Replica._holding(replica, plain)
        self._app = RequestMiddleware(holding, plain.metrics, keys)

    async def _hold(self, name: str) -> None:
        await asyncio.sleep(0.02)
        if self._problem is not None:
            raise self._problem
        self.loaded.append(name)

    async def _routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.waited_s.append(time.perf_counter() - scope[EXCHANGE_KEY].arrived_s)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def get(self, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, dict[str, Any]]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("the request has no body")

        scope = {"type": "http", "method": "GET", "path": path, "query_string": b""}
        asyncio.run(self._app({**scope, "headers": headers}, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request names a model in Ray's header."""
    monkeypatch.setattr(serve, "get_multiplexed_model_id", lambda: "tiny")


@pytest.mark.usefixtures("named")
def test_loading_counts_towards_the_deadline() -> None:
    asked = Asked(Keys(environ={}))
    assert asked.get("/v1/models")[0] == 200
    assert asked.loaded == ["tiny"] and asked.waited_s[0] >= 0.01


@pytest.mark.usefixtures("named")
def test_a_request_without_a_key_loads_no_model() -> None:
    asked = Asked(Keys(environ={"STEPDIAL_API_KEYS": "k" * 20}))
    assert asked.get("/v1/models")[0] == 401
    assert asked.get("/health/ready")[0] == 200
    assert not asked.loaded
    assert asked.get("/v1/models", (b"x-api-key", b"k" * 20))[0] == 200
    assert asked.loaded == ["tiny"]


@pytest.mark.usefixtures("named")
def test_a_model_that_cannot_be_loaded_is_an_answer() -> None:
    async def load(folder: Path) -> None:
        raise BrokenBundle(f"{folder} holds no manifest")

    replica: Any = SimpleNamespace(
        _folders={"tiny": Path("/bundles/tiny")}, _loading=SimpleNamespace(load=load)
    )
    with pytest.raises(ModelGone) as found:
        asyncio.run(Replica._load(replica, "tiny"))
    assert "/bundles" not in str(found.value)
    asked = Asked(Keys(environ={}), found.value)
    status, body = asked.get("/v1/models")
    assert (status, body["error"]["code"]) == (503, "model_gone")
    assert "tiny cannot be loaded" in body["error"]["message"]


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


def test_arguments_of_the_local_cluster() -> None:
    given = arguments_of('{"bundles": ["zoo/topics"]}', [], 2)
    assert given.bundles == (Path("zoo/topics"),)
    assert (given.min_replicas, given.max_replicas) == (2, 2)
    named = arguments_of('{"bundles": ["zoo/topics"], "max_replicas": 1}', [Path("/zoo/digits")], 2)
    assert named.bundles == (Path("/zoo/digits"),)
    assert (named.min_replicas, named.max_replicas) == (1, 1)
    assert arguments_of('{"min_replicas": 5}', [], 2).max_replicas == 5
    for text in ("x", "[]", '{"replicas": 1}', '{"cpus": 0}', '{"min_replicas": "many"}'):
        with pytest.raises(ValueError) as found:
            arguments_of(text, [], 2)
        assert not isinstance(found.value, ValidationError)
