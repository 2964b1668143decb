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
import psutil
import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.ray_cluster import RayCluster, running_cluster
from tests.server_process import server_process
from tests.sse import parse_events
from tests.tiny_folders import classify_bundle, generate_bundle, points_bundle

BUNDLES = [generate_bundle(), classify_bundle(), points_bundle()]
GENERATE: dict[str, Any] = {"model": "tiny-generate", "prompt": "the story ", "seed": 7}
STREAMS, WHOLES, TOKENS = 8, 6, 1000
BACK_S = 10.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # A machine that runs other tests besides may well pause a call for seconds.
    patient = {"stall_s": 30, "stall_unknown_s": 60}
    chosen = json.dumps({"models_per_replica": 2, "spill_requests": 1, "settings": patient})
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


def test_nothing_listens_beyond_this_machine(cluster: RayCluster) -> None:
    first = cluster.nodes()[0].raylet.parent()
    assert first is not None
    listening = {
        (process.name(), end.laddr.ip)
        for process in (first, *first.children(recursive=True))
        for end in process.net_connections("inet")
        if end.status == psutil.CONN_LISTEN
    }
    assert {name for name, _ in listening if "ServeReplica" in name}
    assert {address for _, address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


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
        assert len(ask.post(path, json=body).headers["x-request-id"]) == 16


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
    points = {"input": {"points": [[0.1, 0.2, 0.3]]}, "steps": 1}
    assert ask.post("/v1/classify", json={"model": "tiny-points", **points}).status_code == 200
    held = _held(ask)
    assert sum("tiny-points" in models for models in held.values()) == 1
    assert all(len(models) <= 2 for models in held.values())
    # Whichever model had to leave is answered all the same.
    for body in ({"input": "a film"}, {"model": "tiny-points", **points}):
        assert ask.post("/v1/classify", json=body).status_code == 200
    assert ask.post("/v1/generate", json={**GENERATE, "max_tokens": 2}).status_code == 200


def test_a_killed_node_takes_only_its_own_streams_with_it(
    cluster: RayCluster, ask: httpx.Client
) -> None:
    # One after another: those that come at once may all be sent by the same counts, to one replica.
    readers = [Reader(cluster.url) for _ in range(STREAMS)]
    for reader in readers:
        reader.start()
        assert reader.begun.wait(30)
    wholes = [Whole(cluster.url) for _ in range(WHOLES)]
    for whole in wholes:
        whole.start()
    assert _comes(lambda: _total(ask, "stepdial_in_flight") >= WHOLES)
    victim = next(node for node in cluster.nodes() if node.replicas())
    lost = victim.replica_names()
    assert {reader.replica for reader in readers} > lost
    victim.kill()
    killed_s = time.monotonic()
    assert ask.post("/v1/classify", json={"input": "a film", "steps": 1}).status_code == 200
    assert ask.post("/v1/generate", json={**GENERATE, "max_tokens": 3}).status_code == 200
    assert time.monotonic() - killed_s < BACK_S
    for reader in readers:
        reader.join(60)
    for reader in readers:
        assert reader.end == ("replica_lost" if reader.replica in lost else "done")
    text = next(reader.text for reader in readers if reader.end == "done")
    assert all(text.startswith(reader.text) for reader in readers)
    assert all(reader.text == text for reader in readers if reader.end == "done")
    for whole in wholes:  # those that the replica had are answered by the other
        whole.join(60)
        assert (whole.status, whole.text) == (200, text)


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
        read = ""
        try:
            with httpx.stream("POST", f"{self.url}/v1/generate", json=body, timeout=60) as answer:
                self.replica = answer.headers["x-stepdial-replica"]
                for piece in answer.iter_text():
                    read += piece
                    self.begun.set()
            *tokens, (name, last) = parse_events(read)
            self.text = "".join(data["text"] for _, data in tokens)
            assert all(event == "message" for event, _ in tokens)
            self.end = last["error"]["code"] if name == "error" else name
        except Exception as error:
            self.end = repr(error)


@dataclass(eq=False)
class Whole(threading.Thread):
    """Waits for the same text in one answer."""

    url: str
    status: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        body = {**GENERATE, "steps": 4, "max_tokens": TOKENS}
        answer = httpx.post(f"{self.url}/v1/generate", json=body, timeout=60)
        self.status, self.text = answer.status_code, answer.json().get("text", "")


def _comes(holds: Callable[[], bool]) -> bool:
    """Whether this holds within some seconds."""
    end_s = time.monotonic() + BACK_S
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


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
