"""The Open Inference Protocol against the real process, driven by Triton's own client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferRequestedOutput
from tritonclient.http import aio as tritonaio
from tritonclient.utils import InferenceServerException

from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    translate_bundle,
)
from tests.oip_client import array_in, strings, texts_in
from tests.server_process import ServerProcess, server_process

BUNDLES = [
    classify_bundle(),
    generate_bundle(),
    image_bundle(),
    points_bundle(),
    translate_bundle(),
]
TEXTS = ["a good film", "häßlich", "the story was thin, " * 30]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [bundle.folder for bundle in BUNDLES]
    with server_process(folders) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


@pytest.mark.parametrize("sent", [True, False], ids=["binary in", "JSON in"])
@pytest.mark.parametrize("wanted", [True, False], ids=["binary out", "JSON out"])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_a_classification_says_what_classify_says(
    client: Any, raw: httpx.Client, sent: bool, wanted: bool, packed: str | None
) -> None:
    names = ("label", "score", "steps")
    answer = client.infer(
        "tiny-classify",
        [texts_in(TEXTS, sent)],
        outputs=[InferRequestedOutput(name, binary_data=wanted) for name in names],
        parameters={"steps": 2},
        request_id="mine",
        request_compression_algorithm=packed,
    )
    body = {"model": "tiny-classify", "input": TEXTS, "steps": 2}
    expected = raw.post("/v1/classify", json=body).json()["results"]
    assert strings(answer, "label") == [one["label"] for one in expected]
    scores = answer.as_numpy("score")
    assert scores.dtype == np.float32 and answer.as_numpy("steps").dtype == np.int32
    np.testing.assert_allclose(scores, [one["score"] for one in expected], rtol=1e-6)
    assert answer.as_numpy("steps").tolist() == [2, 2, 2]
    response = answer.get_response()
    assert (response["id"], response["model_version"]) == ("mine", "1")
    facts = response["parameters"]
    assert (facts["reason"], facts["full_steps"], facts["truncated"]) == ("exact", 4, 1)
    assert facts["expected"] < facts["expected_full"] and facts["total_ms"] > 0


def test_the_body_of_the_client_of_kserve(raw: httpx.Client) -> None:
    body = {  # as InferRequest.to_rest() writes it
        "id": "1",
        "model_name": "tiny-classify",
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["good"]}],
    }
    url = "/v2/models/tiny-classify/infer"
    assert raw.post(url, json=body).raise_for_status().json()["id"] == "1"
    other = raw.post(url, json=body | {"model_name": "another"})
    assert other.status_code == 400
    assert "model_name is 'another', but the path names tiny-classify" in other.json()["error"]


@pytest.mark.parametrize(
    ("parameters", "steps", "reason"),
    [
        ({}, 4, "default"),
        ({"effort": "low"}, 1, "effort"),
        ({"max_steps": 2}, 2, "default"),
        ({"deadline_ms": 60000, "min_steps": 2}, 4, "deadline"),
    ],
)
def test_every_budget_is_one_more_parameter(
    client: Any, parameters: dict[str, Any], steps: int, reason: str
) -> None:
    answer = client.infer("tiny-classify", [texts_in(["x"])], parameters=parameters or None)
    assert answer.as_numpy("steps").tolist() == [steps]
    assert answer.get_response()["parameters"]["reason"] == reason


def test_a_negative_seed_comes_back_as_what_counts(client: Any) -> None:
    asked = {"seed": -1, "max_tokens": 2}
    answer = client.infer("tiny-generate", [texts_in(["To be"])], parameters=asked)
    assert answer.get_response()["parameters"]["seed"] == 2**63 - 1


@pytest.mark.parametrize("wanted", [None, True, False], ids=["all", "binary", "JSON"])
def test_several_prompts_are_written_as_each_alone(
    client: Any, raw: httpx.Client, wanted: bool | None
) -> None:
    prompts, how = ["To be", "To be", "Once"], {"max_tokens": 12, "seed": 7, "top_k": 20}
    outputs = None if wanted is None else [InferRequestedOutput("text", binary_data=wanted)]
    answer = client.infer(
        "tiny-generate",
        [texts_in(prompts)],
        outputs=outputs,
        parameters={"steps": 1, "stop": ["zq"], **how},
    )
    alone = [
        raw.post(
            "/v1/generate",
            json={"prompt": prompt, "steps": 1, "stop": ["zq"], **how, "seed": 7 + row},
        ).json()
        for row, prompt in enumerate(prompts)
    ]
    written = strings(answer, "text")
    assert written == [one["text"] for one in alone] and written[0] != written[1]
    assert answer.get_response()["parameters"]["seed"] == 7
    if wanted is None:
        assert answer.as_numpy("steps").tolist() == [1, 1, 1]
        assert strings(answer, "finish_reason") == [one["finish_reason"] for one in alone]
    else:
        assert answer.as_numpy("steps") is None


def test_a_translation_with_beams(client: Any, raw: httpx.Client) -> None:
    how = {"num_beams": 2, "steps": 1, "max_tokens": 8}
    answer = client.infer("tiny-translate", [texts_in(["To be"])], parameters=how)
    body = {"model": "tiny-translate", "prompt": "To be", **how}
    assert strings(answer, "text") == [raw.post("/v1/generate", json=body).json()["text"]]


@pytest.mark.parametrize("binary", [True, False])
def test_images_of_both_datatypes_say_what_classify_says(
    client: Any, raw: httpx.Client, binary: bool
) -> None:
    grey = np.arange(2 * 30, dtype=np.uint8).reshape(2, 1, 6, 5) * 4
    body = {"model": "tiny-image", "input": [{"image": one[0].tolist()} for one in grey]}
    expected = [one["score"] for one in raw.post("/v1/classify", json=body).json()["results"]]
    for array in (grey, grey.astype(np.float32) / 255):
        answer = client.infer("tiny-image", [array_in("image", array, binary)])
        np.testing.assert_allclose(answer.as_numpy("score"), expected, rtol=1e-5)


def test_clouds_say_what_classify_says(client: Any, raw: httpx.Client) -> None:
    clouds = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    body = {"model": "tiny-points", "input": [{"points": one.tolist()} for one in clouds]}
    expected = [one["score"] for one in raw.post("/v1/classify", json=body).json()["results"]]
    answer = client.infer("tiny-points", [array_in("points", clouds)])
    np.testing.assert_allclose(answer.as_numpy("score"), expected, rtol=1e-5)


def test_metadata_names_the_tensors_and_the_dial(client: Any) -> None:
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "parameters"]
    found = client.get_model_metadata("tiny-classify", "1")
    assert found == client.get_model_metadata("tiny-classify")
    assert found["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert {one["name"]: one["datatype"] for one in found["outputs"]} == {
        "label": "BYTES",
        "score": "FP32",
        "steps": "INT32",
    }
    dial = found["parameters"]
    assert (dial["steps"], dial["default_steps"], dial["full_steps"]) == ([1, 2, 4], 4, 4)
    assert dial["efforts"] == {"low": 1, "medium": 2, "high": 4, "max": 4}
    shapes = {
        bundle.manifest.name: client.get_model_metadata(bundle.manifest.name)["inputs"][0]
        for bundle in BUNDLES
    }
    assert shapes["tiny-image"] == {"name": "image", "datatype": "FP32", "shape": [-1, 1, 6, 5]}
    assert shapes["tiny-points"] == {"name": "points", "datatype": "FP32", "shape": [-1, -1, 3]}
    for bundle in BUNDLES:
        named = client.get_model_metadata(bundle.manifest.name)["parameters"]["request"]
        assert ("max_tokens" in named) == (bundle.manifest.task != "classify")
        assert ("num_beams" in named) == (bundle.manifest.task == "translate")


def test_readiness_is_told_of_the_server_and_of_each_model(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("tiny-classify") and client.is_model_ready("tiny-classify", "1")
    assert not client.is_model_ready("tiny-classify", "2") and not client.is_model_ready("nobody")
    index = client.get_model_repository_index()
    assert [one["name"] for one in index] == [bundle.manifest.name for bundle in BUNDLES]
    assert {one["state"] for one in index} == {"READY"}


def test_the_asynchronous_client(server: ServerProcess) -> None:
    async def drive() -> None:
        async with tritonaio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_model_ready("tiny-generate")
            answers = await asyncio.gather(
                *(
                    client.infer(
                        "tiny-classify",
                        [texts_in([f"text {row}"], make=tritonaio.InferInput)],
                        parameters={"steps": steps},
                    )
                    for row in range(4)
                    for steps in (1, 2, 4)
                )
            )
            assert [int(one.as_numpy("steps")[0]) for one in answers] == [1, 2, 4] * 4
            with pytest.raises(InferenceServerException, match="did you mean effort"):
                await client.infer(
                    "tiny-classify",
                    [texts_in(["x"], make=tritonaio.InferInput)],
                    parameters={"efort": "low"},
                )

    asyncio.run(drive())
