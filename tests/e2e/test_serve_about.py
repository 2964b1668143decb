"""What the real process tells of itself: models, ladders, health, metrics, page, documents."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from serve.api import models
from tests.fake_server import fake_server
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders) as running:
        yield running


def test_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    models.ModelList.model_validate(listed, strict=True)
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny-classify", "tiny-generate"]
    one = client.get("/v1/models/tiny-generate").json()
    assert one == listed["data"][1]
    assert (one["task"], one["steps"], one["labels"]) == ("generate", [1, 2, 4], None)
    assert one["efforts"] == {"low": 1, "medium": 2, "high": 4, "max": 4}
    assert [model["cache"] for model in listed["data"]] == ["none", "kv"]


@pytest.mark.parametrize("model", ["tiny-classify", "tiny-generate"])
def test_the_ladder(client: httpx.Client, model: str) -> None:
    client.post("/v1/classify", json={"input": "warm", "steps": 2})
    client.post("/v1/generate", json={"prompt": "warm", "steps": 2})
    ladder = client.get(f"/v1/models/{model}/ladder").json()
    models.LadderResponse.model_validate(ladder, strict=True)
    assert (ladder["model"], ladder["full_steps"], ladder["default_steps"]) == (model, 4, 4)
    assert [rung["steps"] for rung in ladder["rungs"]] == [1, 2, 4]
    assert [rung["latency_ms"] for rung in ladder["rungs"]] == pytest.approx([0.1, 0.2, 0.4])
    assert all(rung["predicted_ms"] > 0 for rung in ladder["rungs"])
    assert ladder["caution"] >= 1 and ladder["answer_ms"] > 0
    used = ladder["rungs"][1]
    assert used["predicted_ms"] != used["latency_ms"]


def test_health(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    for path in ("/health/ready", "/health"):
        assert client.get(path).json() == {"status": "ready"}


def test_metrics(client: httpx.Client) -> None:
    client.post("/v1/generate", json={"prompt": "To be", "max_tokens": 2, "steps": 1})
    response = client.get("/metrics")
    # Older readers of this format refuse any other version, and the names need none.
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        'stepdial_model_info{full_steps="4",method="euler",model="tiny-generate",'
        'precision="fp32",task="generate"} 1.0',
        'stepdial_degraded_total{model="tiny-generate"} 0.0',
        "stepdial_queue_depth 0.0",
        "stepdial_in_flight 0.0",
        "stepdial_cache_bytes 0.0",
    ):
        assert line in response.text
    assert 'stepdial_time_to_first_token_seconds_bucket{le="0.0005",' in response.text
    assert 'stepdial_requests_total{code="200",model="tiny-generate"' in response.text


def test_the_wait_of_a_classification_counts_for_the_steps_it_got(client: httpx.Client) -> None:
    def waits() -> dict[str, float]:
        name = r'stepdial_queue_seconds_count{model="tiny-classify",steps="(\d+)"} (\S+)'
        return {steps: float(n) for steps, n in re.findall(name, client.get("/metrics").text)}

    before = waits()
    for asked, steps in (({"max_steps": 2}, 2), ({"max_steps": 1}, 1), ({}, 4), ({"steps": 1}, 1)):
        answer = client.post("/v1/classify", json={"input": "warm", **asked}).json()
        assert answer["results"][0]["budget"]["steps"] == steps
    after = waits()
    assert {steps: after[steps] - before.get(steps, 0) for steps in after} == {
        "1": 2,
        "2": 1,
        "4": 1,
    }


def test_the_page_and_the_documents_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path in ("/", "/docs"):
        response = client.get(path)
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert 'src="http' not in response.text and '<link rel="stylesheet" href="http' not in (
            response.text
        )
    for headers in ({}, {"range": "bytes=none"}):
        style = client.get("/docs.css", headers=headers)
        assert style.status_code == 200 and style.headers["content-type"].startswith("text/css")
    assert client.get("/static/app.js").status_code == 200
    assert client.get("/static/" + "a" * 300).status_code == 404
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404
    assert client.head("/").status_code == 200


def test_openapi_documents_every_field(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name in ("ClassifyRequest", "GenerateRequest", "TokenChunk", "DoneChunk", "ErrorResponse"):
        assert name in schemas
    undescribed = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, shape in schema.get("properties", {}).items()
        # A reference is described where it leads.
        if not shape.get("description") and "$ref" not in shape
    ]
    assert undescribed == []
    assert [name for name, schema in schemas.items() if not schema.get("description")] == []
    for path in ("/v1/classify", "/v1/generate"):
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rpartition("/")[2] in schemas
        assert {"200", "400", "404", "413", "422", "429", "503"} <= set(operation["responses"])
    references = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {one.partition('"')[0] for one in references} <= set(schemas)


def test_the_reference_page_lists_every_operation(client: httpx.Client) -> None:
    page = client.get("/docs").text
    assert f"<pre>curl {client.base_url}/v1/classify -d " in page  # of this server
    assert client.get("/docs", headers={"host": "a.example"}).text.count("http://a.example/v1/")
    for path in client.get("/openapi.json").json()["paths"]:
        assert f" {path}</code>" in page.replace("<wbr>", "")


def test_the_version_is_that_of_this_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepdial.__version__", "12.3.4")
    with fake_server() as running:
        assert httpx.get(f"{running.url}/v2").json()["version"] == "12.3.4"
        document = httpx.get(f"{running.url}/openapi.json").json()
    assert document["info"]["version"] == "12.3.4"


def test_importing_the_app_does_not_load_torch(server: ServerProcess) -> None:
    with open(f"/proc/{server.process.pid}/maps") as maps:
        assert "torch" not in maps.read()
