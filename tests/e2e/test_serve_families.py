"""The real process on images, points, decoders without caches, and translation."""

import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter

from serve.api import models
from serve.api import native as answers
from tests.fixtures.tiny_folders import (
    classify_bundle,
    generate_bundle,
    image_bundle,
    points_bundle,
    prefix_bundle,
    translate_bundle,
)
from tests.server_process import ServerProcess, server_process
from tests.sse import parse_events

CLASSIFIED = TypeAdapter(answers.ClassifyResponse)
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5), dtype=np.uint8)
CLOUD = np.random.default_rng(0).normal(0, 1, (9, 3)).tolist()
SOURCE = "Zwei Hunde"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    bundles = (
        classify_bundle(),
        image_bundle(),
        points_bundle(),
        generate_bundle(),
        prefix_bundle(),
        translate_bundle(),
    )
    with server_process([bundle.folder for bundle in bundles]) as running:
        yield running


def png(pixels: "np.ndarray[Any, Any]" = PIXELS) -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def classify(client: httpx.Client, value: object, **fields: object) -> Any:
    response = client.post("/v1/classify", json={"input": value, **fields})
    assert response.status_code == 200, response.text
    CLASSIFIED.validate_python(response.json(), strict=True)
    return response.json()


def translate(client: httpx.Client, **fields: object) -> Any:
    body = {"model": "tiny-translate", "prompt": SOURCE, **fields}
    response = client.post("/v1/generate", json=body)
    assert response.status_code == 200, response.text
    answers.GenerateResponse.model_validate(response.json(), strict=True)
    return response.json()


def streamed(client: httpx.Client, **fields: object) -> list[tuple[str, dict[str, Any]]]:
    body = {"model": "tiny-translate", "prompt": SOURCE, "stream": True, **fields}
    return parse_events(client.post("/v1/generate", json=body).text)


def refused(response: httpx.Response, code: str) -> Any:
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    return error


def test_an_image_gets_its_labels_however_it_is_sent(client: httpx.Client) -> None:
    sent = [png(), f"data:image/png;base64,{png()}", PIXELS.tolist(), (PIXELS / 255).tolist()]
    many = classify(client, [{"image": image} for image in sent], steps=2, model="tiny-image")
    assert many["model"] == "tiny-image" and len(many["results"]) == 4
    one = classify(client, {"image": png()}, steps=2)
    assert one["model"] == "tiny-image"
    for result in (*one["results"], *many["results"]):
        assert result["label"] == one["results"][0]["label"] and result["truncated"] is False
        assert result["score"] == pytest.approx(one["results"][0]["score"], abs=1e-5)
        assert len(result["top"]) == 4 and result["budget"]["steps"] == 2
    assert one["results"][0] != classify(client, {"image": png()}, steps=1)["results"][0]


def test_an_image_is_read_as_training_read_it(client: httpx.Client) -> None:
    """The first rung recomputed here, from the weights of the bundle."""
    bundle = image_bundle()
    data = (bundle.folder / bundle.manifest.weights).read_bytes()
    offset, weights = 0, []
    for rows, columns in ((30, 16), (16, 32), (32, 16), (16, 4)):
        offset = -(-offset // 4096) * 4096
        size = rows * columns * 4
        part = np.frombuffer(data[offset : offset + size], np.float32)
        weights.append(part.reshape(rows, columns))
        offset += size
    embed, up, down, head = weights
    x = ((PIXELS.ravel() / 255 - 0.5) / 0.25) @ embed
    logits = (x + np.maximum(x @ up, 0) @ down) @ head
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    result = classify(client, {"image": PIXELS.tolist()}, steps=1)["results"][0]
    scores = {one["label"]: one["score"] for one in result["top"]}
    labels = bundle.manifest.labels or ()
    assert [scores[label] for label in labels] == pytest.approx(expected.tolist(), abs=1e-5)


def test_clouds_of_any_size_get_their_labels(client: httpx.Client) -> None:
    clouds = [CLOUD, CLOUD[:4], [[5 * x + 1 for x in point] for point in CLOUD], [CLOUD[0]] * 3]
    results = classify(client, [{"points": cloud} for cloud in clouds])["results"]
    alone = [classify(client, {"points": cloud})["results"][0] for cloud in clouds]
    for result, expected in zip(results, alone, strict=True):
        assert result["score"] == pytest.approx(expected["score"], abs=1e-6)
    assert results[0]["score"] == pytest.approx(results[2]["score"], abs=1e-5)
    assert results[0]["score"] != pytest.approx(results[1]["score"], abs=1e-5)


def test_the_wrong_kind_is_told_what_the_model_takes(client: httpx.Client) -> None:
    text, image, points = "a film", {"image": png()}, {"points": CLOUD}
    for model, wrong, says in (
        ("tiny-image", text, "takes, which is images: send"),
        ("tiny-image", points, "takes, which is images: send"),
        ("tiny-points", image, "takes, which is points: send"),
        ("tiny-classify", image, "takes, which is text: send a string"),
    ):
        error = refused(
            client.post("/v1/classify", json={"model": model, "input": wrong}), "wrong_input"
        )
        assert says in error["message"] and error["param"].startswith("input")
    mixed = {"model": "tiny-image", "input": [image, text]}
    assert refused(client.post("/v1/classify", json=mixed), "wrong_input")["param"] == "input[1]"
    error = refused(
        client.post("/v1/generate", json={"model": "tiny-image", "prompt": "x"}), "wrong_task"
    )
    assert "/v1/classify" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ('{"input": {"image": "%%%"}}', "input.image", "is no base64"),
        ('{"input": {"image": [[0, 256]]}}', "input.image", "integers from 0 to 255"),
        ('{"input": {"image": [[NaN, 0.5]]}}', "input.image", "finite"),
        ('{"input": {"image": [[1e999]]}}', "input.image", "finite"),
        ('{"input": [{"image": [[0]]}, {"image": {}}]}', "input[1].image", "is no image"),
        ('{"input": {"points": [[0, 0, NaN]]}}', "input.points", "finite"),
        ('{"input": {"points": [[0, 0, -Infinity]]}}', "input.points", "finite"),
        ('{"input": {"points": [[0, 0]]}}', "input.points", "takes 3"),
        ('{"input": {"points": []}}', "input.points", "an empty list"),
    ],
)
def test_malformed_images_and_points(
    client: httpx.Client, body: str, param: str, says: str
) -> None:
    response = client.post("/v1/classify", content=body.encode())
    error = response.json()["error"]
    assert response.status_code == 422, response.text
    assert error["param"] == param and says in error["message"]


def test_a_bomb_is_refused_before_it_goes_off(client: httpx.Client) -> None:
    stream = io.BytesIO()
    Image.new("1", (5_000, 4_000)).save(stream, "PNG")
    bomb = {"image": base64.b64encode(stream.getvalue()).decode()}
    error = refused(client.post("/v1/classify", json={"input": bomb}), "unprocessable")
    assert error["max_pixels"] == 2**24 and "5000 x 4000" in error["message"]
    assert classify(client, {"image": png()})


def test_a_model_of_fixed_depth_has_one_rung(client: httpx.Client) -> None:
    body = {"model": "tiny-prefix", "prompt": "To be", "max_tokens": 5, "temperature": 0}
    answer = client.post("/v1/generate", json=body).json()
    assert answer["budget"]["steps"] == 1 and answer["usage"]["completion_tokens"] == 5
    assert client.post("/v1/generate", json=body | {"steps": 1}).json()["text"] == answer["text"]
    error = refused(client.post("/v1/generate", json=body | {"steps": 2}), "impossible_budget")
    assert "weights of this model differ by depth" in error["message"]
    assert error["ladder"] == [1]
    card = client.get("/v1/models/tiny-prefix").json()
    assert card["depth"] == "fixed"
    assert card["input"] == {"kind": "text", "max_tokens": 40, "exact": False}
    assert client.get("/v1/models/tiny-prefix/ladder").json()["depth"] == "fixed"


def test_a_decoder_without_caches_goes_on_beyond_its_window(client: httpx.Client) -> None:
    body = {"model": "tiny-prefix", "prompt": "a" * 38, "max_tokens": 60, "seed": 3}
    answer = client.post("/v1/generate", json=body).json()
    assert answer["usage"] == {"prompt_tokens": 38, "completion_tokens": 60, "total_tokens": 98}
    assert client.post("/v1/generate", json=body).json()["text"] == answer["text"]


def test_a_translation_is_greedy_unless_it_is_asked_for_more(client: httpx.Client) -> None:
    greedy = translate(client)
    assert greedy["text"] and greedy["finish_reason"] == "stop"
    assert greedy["usage"]["prompt_tokens"] == len(SOURCE)
    assert greedy["usage"]["completion_tokens"] == len(greedy["text"]) + 1
    for same in ({"temperature": 0}, {"num_beams": 1}, {"seed": 5}, {"logprobs": 1}):
        assert translate(client, **same)["text"] == greedy["text"]
    assert translate(client, steps=1)["budget"]["nfe"] == 2
    assert len({translate(client, temperature=2, seed=seed)["text"] for seed in range(4)}) > 1
    short = translate(client, max_tokens=3)
    assert (short["finish_reason"], short["text"]) == ("length", greedy["text"][:3])
    pieces = streamed(client)
    assert "".join(data["text"] for event, data in pieces if event == "message") == greedy["text"]
    assert pieces[-1][0] == "done" and pieces[-1][1]["finish_reason"] == "stop"


def test_beams_answer_in_one_piece_and_always_the_same(client: httpx.Client) -> None:
    wide = translate(client, num_beams=8)
    assert wide["finish_reason"] == "stop" and wide["logprobs"] is None
    assert translate(client, num_beams=8, temperature=0, seed=9)["text"] == wide["text"]
    pieces = streamed(client, num_beams=8)
    assert [event for event, _ in pieces] == ["message", "done"]
    assert pieces[0][1]["text"] == wide["text"]


def test_what_does_not_go_with_beams_is_refused(client: httpx.Client) -> None:
    body = {"model": "tiny-translate", "prompt": SOURCE, "num_beams": 4}
    for more, param in (
        ({"temperature": 0.5}, "temperature"),
        ({"logprobs": 2}, "logprobs"),
        ({"model": "tiny-generate"}, "num_beams"),
        ({"num_beams": 9}, "num_beams"),
    ):
        response = client.post("/v1/generate", json=body | more)
        assert refused(response, "invalid_field")["param"] == param
    unnamed = client.post("/v1/generate", json={"prompt": SOURCE, "num_beams": 2})
    assert unnamed.json()["model"] == "tiny-translate"
    error = refused(client.post("/v1/generate", json=body | {"prompt": "a" * 41}), "unprocessable")
    assert "at most 40: translate it in parts" in error["message"]


def test_requests_of_every_kind_together_get_the_answers_they_get_alone(
    client: httpx.Client,
) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/generate", {"model": "tiny-translate", "prompt": SOURCE}),
        ("/v1/generate", {"model": "tiny-translate", "prompt": "Ein Haus am See", "num_beams": 3}),
        ("/v1/generate", {"model": "tiny-translate", "prompt": SOURCE[:4], "num_beams": 8}),
        ("/v1/generate", {"model": "tiny-prefix", "prompt": "Once", "max_tokens": 40, "seed": 1}),
        (
            "/v1/generate",
            {"model": "tiny-prefix", "prompt": "Once upon", "max_tokens": 9, "seed": 2},
        ),
        ("/v1/classify", {"input": {"image": png()}}),
    ]

    def answer(number: int) -> str:
        path, body = kinds[number % len(kinds)]
        found = client.post(path, json=body).json()
        return json.dumps(found.get("text") or found["results"][0]["label"])

    alone = [answer(number) for number in range(len(kinds))]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(answer, range(2 * len(kinds))))
    assert together == alone * 2
    assert "stepdial_cache_bytes 0.0" in client.get("/metrics").text


def test_a_caller_who_leaves_ends_a_search(client: httpx.Client) -> None:
    body = {"model": "tiny-translate", "prompt": "a" * 40, "num_beams": 8}
    for _ in range(10):
        caller = HTTPConnection(client.base_url.host, client.base_url.port)
        caller.request("POST", "/v1/generate", json.dumps(body))
        time.sleep(0.001)
        caller.close()
    assert translate(client, num_beams=2)["text"]
    text = client.get("/metrics").text
    assert "stepdial_in_flight 0.0" in text and "stepdial_cache_bytes 0.0" in text


def test_models_say_what_they_take(client: httpx.Client) -> None:
    listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    shape = {"channels": 1, "height": 6, "width": 5}
    assert listed["tiny-image"]["input"] == {"kind": "image"} | shape
    assert listed["tiny-points"]["input"] == {"kind": "points", "max_points": 32, "dimensions": 3}
    assert listed["tiny-image"]["max_tokens"] is None
    card = listed["tiny-translate"]
    assert (card["task"], card["max_tokens"], card["target_max_tokens"]) == ("translate", 40, 24)
    for name, one in listed.items():
        ladder = client.get(f"/v1/models/{name}/ladder").json()
        models.LadderResponse.model_validate(ladder, strict=True)
        assert (ladder["task"], ladder["input"]) == (one["task"], one["input"])
    document = client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ClassifyRequest"]
    assert len(schema["examples"]) == 5
    assert "ImageItem" in json.dumps(schema["properties"]["input"])
    assert "0 to translate" in json.dumps(document)
