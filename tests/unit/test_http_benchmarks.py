"""The benchmark of what HTTP takes: a bare handler beside ours."""

from pathlib import Path

from fastapi.testclient import TestClient
from pydantic import TypeAdapter

from benchmarks import bare_fastapi
from benchmarks.bare_app import bare_app, constant_answer
from benchmarks.lab import Result, percentile
from serve.api.fields import ClassifyResponse
from tests.tiny_folders import classify_bundle


def test_both_servers_answer_the_same_request_alike(tmp_path: Path) -> None:
    kept = ["--quick", "--results", str(tmp_path), "--bundles", str(classify_bundle().folder)]
    assert bare_fastapi.main(kept) == 0
    result = Result.read(tmp_path / "bare_fastapi.json")
    assert [row[:2] for row in result.tables[0].rows] == [
        *(["stepdial", 32], ["bare", 32]),
        *(["stepdial", 1], ["bare", 1]),
    ]
    assert [target.relation for target in result.targets] == [">=", "<="]


def test_the_bare_handler_checks_the_request_and_answers_in_our_shape() -> None:
    with TestClient(bare_app(constant_answer(["yes", "no"]))) as client:
        answer = client.post("/v1/classify", json={"input": "text"})
        shown = TypeAdapter(ClassifyResponse).validate_python(answer.json(), strict=True)
        assert [result.get("label") for result in shown["results"]] == ["yes"]
        assert client.post("/v1/classify", json={"inputs": "text"}).status_code == 422


def test_percentiles() -> None:
    assert percentile(range(100), 0.99) == 99
    assert percentile([1.0], 0.99) == 1.0
