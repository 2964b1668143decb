"""Stepdial on a Ray cluster of three nodes on this machine; one is killed while it streams."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.tiny_folders import classify_bundle, generate_bundle, points_bundle
from tests.ray_cluster import RayCluster, running_cluster
from tests.server_process import server_process
from tests.sse import parse_events

pytestmark = pytest.mark.long
BUNDLES = [generate_bundle(), classify_bundle(), points_bundle()]
GENERATE: dict[str, Any] = {"model": "tiny-generate", "prompt": "the story ", "seed": 7}
STREAMS, TOKENS = 8, 4000  # long enough to be on their way when a node is killed
BACK_S = 10.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # A machine that runs other tests besides may well pause a call for seconds.
    patient = {"stall_s": 30, "stall_unknown_s": 60}
    chosen = json.dumps({"models_per_replica": 2, "settings": patient})
    folders = [bundle.folder for bundle in BUNDLES]
    with running_cluster(folders, "--arguments", chosen, "--replace-s", "600") as running:
        yield running


@pytest.fixture(scope="module")
def ask(cluster: RayCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def test_answers_are_those_of_a_server_without_ray(ask: httpx.Client) -> None:
    asked = [
        ("/v1/generate", {**GENERATE, "steps": 2, "max_tokens": 40}),
        ("/v1/classify", {"input": ["a good film", "thin"], "steps": 4, "top_k": 2}),
        ("/v1/completions", {**GENERATE, "steps": 1, "max_tokens": 9}),
        ("/v1/generate", {**GENERATE, "steps": 3}),
        ("/v1/generate", {**GENERATE, "model": "none"}),
        ("/v1/classify", {"input": 3}),
        ("/v2/models/tiny-classify/infer", {"inputs": []}),
    ]
    with server_process([bundle.folder for bundle in BUNDLES]) as server:
        for path, body in asked:
            plain = httpx.post(server.url + path, json=body, timeout=30)
            on_ray = ask.post(path, json=body)
            assert on_ray.status_code == plain.status_code, path
            assert _lasting(on_ray.json()) == _lasting(plain.json()), path
        listed = [httpx.get(f"{at}/v1/models").json()["data"] for at in (server.url, ask.base_url)]
        assert _lasting(listed[0]) == _lasting(listed[1])
    assert ask.get("/health/ready").json() == {"status": "ready"}
    assert ask.post("/admin/models", json={}).json()["error"]["code"] == "admin_off"
    assert len(ask.get("/v1/models").headers["x-stepdial-replica"]) == 8


def test_a_stream_is_whole_and_ends_once(ask: httpx.Client) -> None:
    body = {**GENERATE, "steps": 4, "max_tokens": 200}
    whole = ask.post("/v1/generate", json=body).json()
    *tokens, (name, done) = parse_events(
        ask.post("/v1/generate", json=body | {"stream": True}).text
    )
    assert [data["index"] for _, data in tokens] == list(range(200))
    assert "".join(data["text"] for _, data in tokens) == whole["text"]
    assert name == "done" and done["budget"] == whole["budget"]


def test_an_answer_has_one_id_and_its_clients_own(ask: httpx.Client) -> None:
    for path in ("/v1/classify", "/admin/models", "/v1/none"):
        body, sent = {"input": "a film", "steps": 1}, {"x-request-id": "mine"}
        headers = ask.post(path, json=body, headers=sent).headers
        assert headers.get_list("x-request-id") == ["mine"], path
        assert headers.get_list("x-frame-options") == ["DENY"], path
        assert len(ask.post(path, json=body).headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_ends_the_work(cluster: RayCluster, ask: httpx.Client, stream: bool) -> None:
    before = _total(ask, "stepdial_cancelled_total")
    body = json.dumps({**GENERATE, "steps": 4, "max_tokens": 4000, "stream": stream})
    with socket.create_connection((cluster.host, cluster.port)) as client:
        head = f"POST /v1/generate HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        assert _comes(lambda: _total(ask, "stepdial_in_flight") == 1)
    assert _comes(lambda: _total(ask, "stepdial_cancelled_total") == before + 1)
    assert _total(ask, "stepdial_in_flight") == 0


def test_replicas_hold_no_more_models_than_they_may(ask: httpx.Client) -> None:
    assert Counter(_held(ask).values()) == {("tiny-classify", "tiny-generate"): 2}
    points = {"model": "tiny-points", "input": {"points": [[0.1, 0.2, 0.3]]}, "steps": 1}
    refused = ask.post("/v1/classify", json=points)
    assert refused.json()["error"]["code"] == "model_gone"
    assert "serve_multiplexed_model_id: tiny-points" in refused.json()["error"]["message"]
    # Whichever model has to leave, one that is named in the header is loaded and answers.
    for name, path, body in (
        ("tiny-points", "/v1/classify", points),
        ("tiny-classify", "/v1/classify", {"model": "tiny-classify", "input": "a film"}),
        ("tiny-generate", "/v1/generate", {**GENERATE, "max_tokens": 2}),
    ):
        answer = ask.post(path, json=body, headers={"serve_multiplexed_model_id": name})
        assert answer.status_code == 200, answer.text
        assert all(len(models) <= 2 for models in _held(ask).values())


def test_a_killed_node_takes_only_its_own_streams_with_it(
    cluster: RayCluster, ask: httpx.Client
) -> None:
    # One after another: those that come at once may all be sent by the same counts, to one replica.
    readers = [Reader(cluster.url) for _ in range(STREAMS)]
    for reader in readers:
        reader.start()
        assert reader.begun.wait(30)
    victim = next(node for node in cluster.nodes() if node.replicas())
    lost = victim.replica_names()
    assert {reader.replica for reader in readers} > lost
    victim.kill()
    assert _comes(lambda: _answers(ask))
    assert all(_answers(ask) for _ in range(20))
    for reader in readers:
        reader.join(60)
    for reader in readers:
        assert reader.end == ("cut" if reader.replica in lost else "done")


@dataclass(eq=False)  # threads are told apart by what they are
class Reader(threading.Thread):
    """Reads one stream to its end, whatever that is."""

    url: str
    text: str = ""
    end: str = ""
    replica: str = ""
    begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        body = {**GENERATE, "steps": 4, "max_tokens": TOKENS, "stream": True}
        named = {"serve_multiplexed_model_id": "tiny-generate"}
        url, read = f"{self.url}/v1/generate", ""
        try:
            with httpx.stream("POST", url, json=body, headers=named, timeout=60) as answer:
                self.replica = answer.headers["x-stepdial-replica"]
                for piece in answer.iter_text():
                    read += piece
                    self.begun.set()
            *tokens, (name, last) = parse_events(read)
            self.text = "".join(data["text"] for _, data in tokens)
            assert all(event == "message" for event, _ in tokens)
            self.end = last["error"]["code"] if name == "error" else name
        except httpx.RemoteProtocolError:
            self.end = "cut"
        except Exception as error:
            self.end = repr(error)


def _comes(holds: Callable[[], bool]) -> bool:
    """Whether this holds within some seconds."""
    end_s = time.monotonic() + BACK_S
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def _answers(ask: httpx.Client) -> bool:
    return ask.get("/v1/models").status_code == 200


def _total(ask: httpx.Client, name: str) -> float:
    """Of this sample, over all replicas."""
    families = text_string_to_metric_families(ask.get("/metrics").text)
    return sum(one.value for family in families for one in family.samples if one.name == name)


def _held(ask: httpx.Client) -> dict[str, tuple[str, ...]]:
    """The models that each replica holds, by what it tells of itself."""
    held: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(ask.get("/metrics").text):
        for sample in family.samples:
            models = held.setdefault(sample.labels["replica"], set())
            if sample.name == "stepdial_model_info":
                models.add(sample.labels["model"])
    return {replica: tuple(sorted(models)) for replica, models in held.items()}


def _lasting(answer: Any) -> Any:
    """What must be the same whenever and wherever it was answered."""
    if isinstance(answer, list):
        return [_lasting(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    passing = ("id", "timing", "created")
    return {name: _lasting(one) for name, one in answer.items() if name not in passing}
