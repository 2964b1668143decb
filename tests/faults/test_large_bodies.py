"""Bodies as large as the limit, many at once: the server answers others as if they were not."""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import ServerProcess, server_process

CHARACTERS = 1_000_000
WORDS = "a good film, and then a bad one " * (CHARACTERS // 32)
TEXTS = {"words": WORDS, "one word": "q" * CHARACTERS}
GROWTH_KIB = 150 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    folders = [classify_bundle().folder, generate_bundle().folder]
    with server_process(folders, "--body-timeout-s", "5", cold=True) as running:
        yield running


@pytest.mark.parametrize("kind", TEXTS)
def test_sixteen_large_bodies_hold_up_nobody(server: ServerProcess, kind: str) -> None:
    httpx.post(f"{server.url}/v1/classify", json={"input": "warm"}, timeout=30)
    before_kib = server.memory_kib()
    requests = [
        (path, json.dumps(body).encode(), status)
        for path, body, status in (
            ("/v1/generate", {"prompt": TEXTS[kind]}, 422),
            ("/v1/classify", {"input": TEXTS[kind]}, 200),
            ("/v1/classify", {"input": TEXTS[kind], "truncate": False}, 422),
            ("/v1/classify", {"input": [TEXTS[kind][:15_000]] * 64}, 200),
        )
    ] * 4
    probes_s: list[float] = []
    memory_kib: list[int] = []
    done = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not done.is_set():
                began_s = time.perf_counter()
                assert client.get("/health/live").status_code == 200
                probes_s.append(time.perf_counter() - began_s)
                memory_kib.append(server.memory_kib())
                time.sleep(0.01)

    def send(path: str, content: bytes) -> int:
        return httpx.post(f"{server.url}{path}", content=content, timeout=60).status_code

    with ThreadPoolExecutor(len(requests) + 1) as pool:
        probing = pool.submit(probe)
        try:
            sent = [pool.submit(send, path, content) for path, content, _ in requests]
            statuses = [one.result() for one in sent]
        finally:
            done.set()
        probing.result()
    assert statuses == [status for _, _, status in requests]
    assert statistics.median(probes_s) < 0.25
    assert max(memory_kib) - before_kib < GROWTH_KIB
