"""Requests that run together: each gets what it would have got alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import server_process
from tests.sse import parse_events


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    # As many kept as there are threads: httpx may read one that another thread closes as too many.
    limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
    folders = [classify_bundle().folder, generate_bundle().folder]
    with (
        server_process(folders) as server,
        httpx.Client(base_url=server.url, timeout=60, limits=limits) as connected,
    ):
        yield connected


def generate(client: httpx.Client, number: int) -> str:
    body: dict[str, Any] = {
        "prompt": "To be, or not to be"[: 3 + number % 16],
        "max_tokens": 20 + 11 * (number % 7),
        "seed": number,
        "steps": (1, 2, 4)[number % 3],
        "stream": number % 2 == 0,
    }
    response = client.post("/v1/generate", json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return str(response.json()["text"])
    *tokens, (last, _) = parse_events(response.text)
    assert last == "done"
    return "".join(chunk["text"] for _, chunk in tokens)


def classify(client: httpx.Client, number: int) -> float:
    body = {"input": "good " * (1 + number % 9) + "film", "steps": (1, 2, 4)[number % 3]}
    response = client.post("/v1/classify", json=body)
    assert response.status_code == 200, response.text
    return float(response.json()["results"][0]["score"])


@pytest.mark.long
def test_the_same_seed_gives_the_same_text_in_any_company(client: httpx.Client) -> None:
    alone = [generate(client, number) for number in range(24)]
    assert len(set(alone)) == 24
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            together = list(pool.map(lambda number: generate(client, number), range(24)))
            assert together == alone
    metrics = client.get("/metrics").text
    decoded = 'stepdial_batch_rows_bucket{kind="decode",le="1.0",model="tiny-generate"}'
    alone_calls = float(metrics.partition(decoded + " ")[2].split("\n")[0])
    count = 'stepdial_batch_rows_count{kind="decode",model="tiny-generate"}'
    assert alone_calls < float(metrics.partition(count + " ")[2].split("\n")[0])


def test_scores_are_the_same_in_any_company(client: httpx.Client) -> None:
    alone = [classify(client, number) for number in range(27)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda number: classify(client, number), range(27)))
    assert together == pytest.approx(alone, abs=1e-5)


def test_both_tasks_at_once_leave_nothing_behind(client: httpx.Client) -> None:
    with ThreadPoolExecutor(32) as pool:
        texts = [pool.submit(generate, client, number) for number in range(40)]
        scores = [pool.submit(classify, client, number) for number in range(120)]
        assert all(text.result() for text in texts)
        assert all(score.result() > 0 for score in scores)
    metrics = client.get("/metrics").text
    for gauge in ("queue_depth", "in_flight", "cache_bytes"):
        assert f"stepdial_{gauge} 0.0" in metrics
