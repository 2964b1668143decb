"""A model that labels each token, over HTTP: tokens with their places, traces, budgets, errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serve.bundle import Calibration, Level
from serve.runtime import open_model
from tests.fixtures.tiny_bundles import build_classify
from tests.fixtures.tiny_families import PUZZLE, build_tag
from tests.server_process import ServerProcess, server_process

# The tiny tagger's least sure position is ahead by little: some rows stop at once, others never do.
CALIBRATION = Calibration(
    rows=3000,
    confidence=0.95,
    source="made up",
    levels=(Level(0.01, None, 8.0, 0.0), Level(0.05, 0.1, 4.0, 0.01), Level(0.1, 0.0, 1.0, 0.1)),
)
PUZZLES = ["12.4..3.", "..", "654321", "1.2.3.4.5.6."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tags")
    build_classify(folder / "labels", name="labels")
    build_tag(folder / "logic", name="logic", calibration=CALIBRATION)
    build_tag(folder / "names", name="names", words=True)
    build_tag(folder / "square", name="square", max_tokens=16, exact=True)
    build_tag(folder / "phrase", name="phrase", words=True, max_tokens=8, exact=True)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    names = ("labels", "logic", "names", "square", "phrase")
    with server_process([folder / name for name in names]) as served:
        yield served


def tag(server: ServerProcess, given: object, **fields: object) -> httpx.Response:
    body = {"model": "logic", "input": given} | fields
    return httpx.post(f"{server.url}/v1/classify", json=body, timeout=30)


def results(server: ServerProcess, given: object, **fields: object) -> list[dict[str, Any]]:
    answer = tag(server, given, **fields)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["results"]
    return found


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_every_token_has_the_label_that_the_runtime_gives_it(
    server: ServerProcess, folder: Path, steps: int
) -> None:
    from serve.bundle import read_bundle

    bundle = read_bundle(folder / "logic")
    classifier = open_model(bundle, 1).classifier(steps)
    for text, result in zip(PUZZLES, results(server, PUZZLES, steps=steps), strict=True):
        rows = np.array([[1 + PUZZLE.index(character) for character in text]])
        logits = classifier.run(rows)[0].astype(np.float64)  # (N, C)
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        labels = [PUZZLE[1:][index] for index in logits.argmax(-1)]
        assert [token["label"] for token in result["tokens"]] == labels
        assert [token["text"] for token in result["tokens"]] == list(text)
        places = [(token["start"], token["end"]) for token in result["tokens"]]
        assert places == [(index, index + 1) for index in range(len(text))]
        given = [token["score"] for token in result["tokens"]]
        np.testing.assert_allclose(given, scores.max(-1), atol=1e-5)
        assert result["text"] == "".join(labels)
        budget = result["budget"]
        assert (budget["steps"], budget["reason"], budget["full_steps"]) == (steps, "exact", 8)
        assert not result["truncated"] and "trace" not in result


def test_words_have_the_places_that_they_have_in_the_text(server: ServerProcess) -> None:
    text = " a good  film é\t東 is"
    (result,) = results(server, text, model="names")
    tokens = result["tokens"]
    assert "text" not in result and not result["truncated"]
    assert all(token["text"] == text[token["start"] : token["end"]] for token in tokens)
    assert all(token["label"] in ("other", "person", "place") for token in tokens)
    starts = [token["start"] for token in tokens]
    assert starts == sorted(starts)
    assert [token["text"] for token in tokens] == text.split()


def test_a_trace_is_what_the_rungs_of_fewer_steps_answer(server: ServerProcess) -> None:
    (traced,) = results(server, PUZZLES[0], steps=8, trace=True)
    assert [readout["steps"] for readout in traced["trace"]] == list(range(1, 9))
    assert traced["trace"][-1]["labels"] == [token["label"] for token in traced["tokens"]]
    assert traced["trace"][-1]["text"] == traced["text"]
    for steps in (1, 2, 4, 8):
        (rung,) = results(server, PUZZLES[0], steps=steps)
        readout = traced["trace"][steps - 1]
        assert readout["labels"] == [token["label"] for token in rung["tokens"]]
        given = [token["score"] for token in rung["tokens"]]
        np.testing.assert_allclose(readout["scores"], given, atol=1e-5)
    assert len({readout["text"] for readout in traced["trace"]}) > 1


def test_a_classifier_can_be_traced_too(server: ServerProcess) -> None:
    body = {"model": "labels", "input": "a good film", "steps": 4, "trace": True}
    answer = httpx.post(f"{server.url}/v1/classify", json=body, timeout=30).json()
    (result,) = answer["results"]
    assert [readout["steps"] for readout in result["trace"]] == [1, 2, 3, 4]
    assert result["trace"][-1]["labels"] == [result["label"]]
    assert result["trace"][-1]["scores"] == pytest.approx([result["score"]], abs=1e-5)


def test_rows_that_are_sure_of_every_position_stop_early(server: ServerProcess) -> None:
    loose = results(server, PUZZLES, max_disagreement=0.1)
    assert {result["budget"]["steps"] for result in loose} == {1}
    (one,) = results(server, PUZZLES[0], steps=1)
    assert loose[0]["tokens"] == one["tokens"]
    some = results(server, PUZZLES, max_disagreement=0.05, trace=True)
    plain = results(server, PUZZLES, max_disagreement=0.05)
    assert [result["budget"]["steps"] for result in some] == [
        result["budget"]["steps"] for result in plain
    ]
    assert all(len(result["trace"]) == result["budget"]["steps"] for result in some)
    for budget in (result["budget"] for result in some):
        assert budget["reason"] == "disagreement" and budget["max_disagreement"] == 0.05


@pytest.mark.parametrize(
    "fields",
    [{"effort": "low"}, {"deadline_ms": 5000}, {"min_steps": 4, "deadline_ms": 5000}, {}],
)
def test_every_budget_works(server: ServerProcess, fields: dict[str, object]) -> None:
    for traced in (False, True):
        found = results(server, PUZZLES, trace=traced, **fields)
        assert len(found) == len(PUZZLES)
        assert all(result["budget"]["steps"] in (1, 2, 4, 8) for result in found)
        assert all(("trace" in result) == traced for result in found)


def test_a_long_text_is_cut_and_the_rest_stays_as_it_was(server: ServerProcess) -> None:
    text = "1." * 20
    (result,) = results(server, text)
    places = [token["start"] for token in result["tokens"]]
    assert places == [*range(20), *range(36, 40)] and result["truncated"]
    assert result["text"][20:36] == text[20:36]
    refused = tag(server, text, truncate=False)
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "input"
    long = "a good film " * 5000
    (result,) = results(server, long, model="names")
    assert result["truncated"] and 8 <= len(result["tokens"]) <= 24
    assert [token["text"] for token in result["tokens"][:3]] == ["a", "good", "film"]
    assert result["tokens"][-1]["end"] == len(long) - 1


@pytest.mark.parametrize(
    ("given", "fields", "status", "param"),
    [
        ("12x", {}, 422, "input"),
        ("", {}, 422, "input"),
        ("12", {"top_k": 1}, 422, "top_k"),
        ("12", {"steps": 3}, 422, "steps"),
        ("12", {"trace": "yes"}, 422, "trace"),
        ({"image": [[0]]}, {}, 422, "input.image"),
    ],
)
def test_what_is_impossible_is_refused(
    server: ServerProcess, given: object, fields: dict[str, object], status: int, param: str
) -> None:
    answer = tag(server, given, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.mark.parametrize("truncate", [True, False])
def test_a_text_of_another_length_is_refused_where_all_have_one(
    server: ServerProcess, truncate: bool
) -> None:
    square = "12.4..3.5126.3.4"
    (result,) = results(server, square, model="square", truncate=truncate)
    assert len(result["tokens"]) == 16 and not result["truncated"]
    for wrong, found in (
        (square[:15], "15 characters"),
        (square + ".", "17 characters"),
        ("1", "1 c"),
    ):
        answer = tag(server, [square, wrong], model="square", truncate=truncate)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["max_tokens"]) == (422, "input[1]", 16)
        assert error["message"].startswith(f"input[1] has {found}")
        assert "reads exactly 16: send a text of 16 characters" in error["message"]
        assert error["tokens"] == len(wrong)
    for text, found in (("a good film", "tokens"), ("a good film " * 5000, "more than 8 tokens")):
        answer = tag(server, text, model="phrase", truncate=truncate)
        assert answer.status_code == 422 and found in answer.json()["error"]["message"]


def test_the_length_is_also_fixed_for_other_clients(server: ServerProcess) -> None:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["12."]}]}
    answer = httpx.post(f"{server.url}/v2/models/square/infer", json=body, timeout=30)
    assert answer.status_code == 400 and "reads exactly 16" in answer.text
    card = httpx.get(f"{server.url}/v1/models/square").json()
    assert card["input"] == {"kind": "text", "max_tokens": 16, "exact": True}
    assert httpx.get(f"{server.url}/v1/models/logic").json()["input"]["exact"] is False


def test_the_card_and_the_ladder_say_what_it_is(server: ServerProcess) -> None:
    card = httpx.get(f"{server.url}/v1/models/logic").json()
    assert (card["task"], card["labels"], card["dial"]) == ("tag", list("123456"), "time")
    assert (card["full_steps"], card["grid_steps"]) == (8, 4)
    ladder = httpx.get(f"{server.url}/v1/models/logic/ladder").json()
    assert [rung["quality"]["exact"] for rung in ladder["rungs"]] == pytest.approx(
        [0, 0.1, 0.2, 0.3]
    )
    wrong = httpx.post(f"{server.url}/v1/generate", json={"model": "logic", "prompt": "12"})
    assert wrong.status_code == 422 and "/v1/classify" in wrong.text


def test_the_open_inference_protocol_gives_the_tokens_of_each_row(server: ServerProcess) -> None:
    url = f"{server.url}/v2/models/logic"
    outputs = {one["name"]: one["datatype"] for one in httpx.get(url).json()["outputs"]}
    assert outputs == {"tokens": "BYTES", "score": "FP32", "steps": "INT32"}
    body = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(PUZZLES)], "data": PUZZLES}],
        "parameters": {"steps": 4},
    }
    answer = httpx.post(f"{url}/infer", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    columns = {one["name"]: one["data"] for one in answer.json()["outputs"]}
    expected = results(server, PUZZLES, steps=4)
    for row, result in enumerate(expected):
        assert json.loads(columns["tokens"][row]) == result["tokens"]
        least = min(token["score"] for token in result["tokens"])
        assert columns["score"][row] == pytest.approx(least, abs=1e-6)
    assert columns["steps"] == [4] * len(PUZZLES)
