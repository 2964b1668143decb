"""The benchmark of the Open Inference Protocol: what it changes in the description, and counts."""

from typing import Any

import pytest

from benchmarks import oip_conformance
from benchmarks.lab import NOTHING_TO_MEASURE
from tests.fixtures.tiny_folders import classify_bundle

PATH = "/v2/models/${MODEL_NAME}/versions/${MODEL_VERSION}/infer"


def described() -> dict[str, Any]:
    return {
        "paths": {PATH: {"post": {"requestBody": {}}}},
        "components": {"schemas": {"inference_request": {"open": True}}},
    }


def test_without_a_description_it_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(oip_conformance.VARIABLE, raising=False)
    assert oip_conformance.main(["--quick"]) == NOTHING_TO_MEASURE
    assert "STEPDIAL_OIP_DESCRIPTION" in capsys.readouterr().err


def test_the_first_run_is_of_the_description_as_it_is() -> None:
    published, corrected, narrowed = (
        variant.change(described(), classify_bundle().manifest)
        for variant in oip_conformance.VARIANTS
    )
    assert published == described() and not oip_conformance.VARIANTS[0].config
    assert list(corrected["paths"]) == [PATH.replace("$", "")]
    assert corrected["components"] == described()["components"]
    asked = narrowed["components"]["schemas"]["inference_request"]["properties"]
    assert asked["parameters"]["properties"]["steps"]["enum"] == [1, 2, 4]


def test_a_failure_counts_for_each_operation_that_has_it() -> None:
    report = {
        "complete": True,
        "errors": [],
        "test_cases": {"generated": 9},
        "failures": [{"title": "Undocumented status code", "operations": ["GET /a", "GET /b"]}],
        "valid_rates": {
            "POST /x/infer": {"coverage": {"accepted": 2}, "fuzzing": {"accepted": 3}},
            "GET /v2/": {"coverage": {"accepted": 1}},
        },
    }
    found = oip_conformance.Outcome.of(report)
    assert (found.cases, found.answered, len(found.failures)) == (9, 5, 2)
