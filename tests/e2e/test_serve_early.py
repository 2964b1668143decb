"""max_disagreement over HTTP: rows stop where they are sure; what was not calibrated is refused."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.bundle import Calibration, Level
from tests.fixtures.tiny_bundles import CORPUS, build_classify, build_generate
from tests.server_process import ServerProcess, server_process

# The tiny classifier's answers are ahead by 0.02 to 0.7: some rows stop at once, others never do.
CALIBRATION = Calibration(
    rows=3000,
    confidence=0.95,
    source="made up",
    levels=(Level(0.01, None, 4.0, 0.0), Level(0.05, 0.2, 2.0, 0.01), Level(0.1, 0.0, 1.0, 0.1)),
)
TEXTS = [*CORPUS, *(text[::-1] for text in CORPUS)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("early")
    bundles = [
        build_classify(folder / "sure", name="sure", calibration=CALIBRATION),
        build_classify(folder / "plain", name="plain"),
        build_generate(folder / "writer", name="writer"),
    ]
    with server_process([bundle.folder for bundle in bundles], "--access-log") as served:
        yield served


def classify(server: ServerProcess, **fields: object) -> httpx.Response:
    body = {"model": "sure", "input": TEXTS} | fields
    return httpx.post(f"{server.url}/v1/classify", json=body, timeout=30)


def test_each_row_takes_the_steps_that_it_needs(server: ServerProcess) -> None:
    full = classify(server, steps=4).json()["results"]
    answer = classify(server, max_disagreement=0.05)
    assert answer.status_code == 200, answer.text
    budgets = [result["budget"] for result in answer.json()["results"]]
    taken = {budget["steps"] for budget in budgets}
    assert len(taken) > 1 and min(taken) == 1
    for budget in budgets:
        assert (budget["reason"], budget["full_steps"]) == ("disagreement", 4)
        assert budget["nfe"] == budget["steps"] and budget["max_disagreement"] == 0.05
        assert budget["expected"]["value"] == budget["expected"]["full_value"]
    for result, whole in zip(answer.json()["results"], full, strict=True):
        if result["budget"]["steps"] == 4:
            assert result["score"] == pytest.approx(whole["score"], abs=1e-5)


def test_the_loosest_level_stops_at_once_and_the_strictest_never(server: ServerProcess) -> None:
    loose = classify(server, max_disagreement=0.5).json()["results"]
    assert {result["budget"]["steps"] for result in loose} == {1}
    strict = classify(server, max_disagreement=0.02).json()["results"]
    assert {result["budget"]["steps"] for result in strict} == {4}
    assert not any("max_disagreement" in result["budget"] for result in strict)


def test_log_and_times_have_the_steps_that_were_taken(server: ServerProcess) -> None:
    named = {"x-request-id": "one-step"}
    body = {"model": "sure", "input": TEXTS, "max_disagreement": 0.5}
    answer = httpx.post(f"{server.url}/v1/classify", json=body, headers=named, timeout=30)
    assert {result["budget"]["steps"] for result in answer.json()["results"]} == {1}
    server.wait_until_it_says("one-step model=sure steps=1 reason=disagreement")
    name = 'stepdial_request_seconds_count{model="sure",route="/v1/classify",steps="1"}'
    assert name in httpx.get(f"{server.url}/metrics").text


def test_the_metrics_count_what_was_evaluated(server: ServerProcess) -> None:
    def evaluations() -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        name = 'stepdial_velocity_evaluations_total{kind="classify",model="sure"}'
        found = [line for line in lines if line.startswith(name)]
        return float(found[0].split()[-1]) if found else 0.0

    before = evaluations()
    budgets = [one["budget"] for one in classify(server, max_disagreement=0.05).json()["results"]]
    assert evaluations() - before == sum(budget["nfe"] for budget in budgets)


def test_what_cannot_be_promised_is_refused(server: ServerProcess) -> None:
    plain = classify(server, model="plain", max_disagreement=0.01)
    assert plain.status_code == 422
    assert plain.json()["error"]["code"] == "not_calibrated"
    both = classify(server, max_disagreement=0.05, steps=1)
    assert (both.status_code, both.json()["error"]["code"]) == (422, "impossible_budget")
    for wrong in (0, 1, -0.1, "0.1", True):
        assert classify(server, max_disagreement=wrong).status_code == 422
    body = {"model": "writer", "prompt": "To be", "max_disagreement": 0.01}
    written = httpx.post(f"{server.url}/v1/generate", json=body, timeout=30)
    assert written.status_code == 422
    assert written.json()["error"]["code"] == "not_calibrated"


def test_the_model_card_names_the_levels(server: ServerProcess) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["sure"]["max_disagreement"] == [0.05, 0.1]
    assert cards["plain"]["max_disagreement"] == cards["writer"]["max_disagreement"] == []
