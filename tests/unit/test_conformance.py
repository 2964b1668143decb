"""The benchmark against our own document: what it narrows, and how it counts."""

import copy
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks import conformance
from benchmarks.conformance import accepted_of, check_complete, failures_of, narrowed
from serve.app import create_app
from serve.bundle import Bundle
from serve.engine.engine import Engine
from serve.metrics import Metrics
from serve.settings import Settings
from tests.fake_model import Mood, fake_catalog
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    translate_bundle,
)

REPORT = {
    "failures": [{"title": "Server error", "operations": ["GET /a", "POST /b"]}],
    "valid_rates": {
        "POST /b": {"coverage": {"accepted": 2}, "fuzzing": {"accepted": 3}},
        "GET /a": {"coverage": {"accepted": 1}},
    },
}


@pytest.fixture(scope="module")
def bundles() -> list[Bundle]:
    return [
        classify_bundle(),
        generate_bundle(),
        image_bundle(),
        points_bundle(),
        translate_bundle(),
    ]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    settings = Settings()
    engine = Engine(fake_catalog(Mood(), classify_bundle()), settings.limits, Metrics())
    return create_app(settings, engine).openapi()


def taken(document: dict[str, Any], path: str) -> Draft202012Validator:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return Draft202012Validator(body["schema"])


def test_narrowed_takes_what_the_models_can_do(
    document: dict[str, Any], bundles: list[Bundle]
) -> None:
    before = copy.deepcopy(document)
    found = narrowed(document, bundles)
    assert document == before
    generate = taken(found, "/v1/generate")
    asked = {"model": "tiny-generate", "prompt": "To be"}
    can: list[dict[str, Any]] = [{}, {"steps": 2}, {"effort": "low", "seed": 7}, {"stream": True}]
    assert all(generate.is_valid(asked | fields) for fields in can)
    cannot: list[dict[str, Any]] = [{"steps": 3}, {"steps": 2, "effort": "low"}, {"prompt": "\0"}]
    assert not any(generate.is_valid(asked | fields) for fields in cannot)
    points = {"model": "tiny-points", "input": {"points": [[0.1, 0.2, 0.3]]}}
    assert taken(found, "/v1/classify").is_valid(points)
    assert not taken(found, "/v1/classify").is_valid(points | {"model": "tiny-image"})
    names = found["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["schema"]["enum"]
    assert names == [bundle.manifest.name for bundle in bundles]
    assert sum(path.endswith("/infer") for path in found["paths"]) == 2 * len(bundles)
    assert not [path for path in found["paths"] if path.startswith("/admin/")]


def test_a_refusal_is_documented_in_the_shape_of_its_protocol(document: dict[str, Any]) -> None:
    shapes = {"/v2": "OipError", "/v1/models": "OpenAIError", "/metrics": "ErrorResponse"}
    for path, shape in shapes.items():
        content = document["paths"][path]["get"]["responses"]["401"]["content"]
        assert content["application/json"]["schema"]["$ref"].endswith(f"/{shape}")


def test_failures_and_answers_are_counted_by_operation() -> None:
    assert failures_of(REPORT) == ("GET /a: Server error", "POST /b: Server error")
    assert accepted_of(REPORT, ["POST /b", "POST /c"]) == 5
    check_complete({"complete": True, "errors": []})
    for found in ({"complete": False, "errors": []}, {"complete": True, "errors": ["one"]}):
        with pytest.raises(SystemExit, match="did not finish"):
            check_complete(found)


def test_it_makes_the_models_that_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        conformance.main(["--bundles", "zoo/sentiment"])
    assert "models of every kind" in capsys.readouterr().err
