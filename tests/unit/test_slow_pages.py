"""Pages that take long to make hold up nobody else: /metrics, and the documents of the API."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.openapi.utils import get_openapi

from serve.metrics import Metrics
from tests.fake_server import fake_server


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
def test_others_are_answered_while_a_page_is_made(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **named: Any) -> Any:
            begun.set()
            assert may_end.wait(20)
            return make(*given, **named)

        return made

    monkeypatch.setattr(Metrics, "exposition", slow(Metrics.exposition))
    monkeypatch.setattr("serve.app.get_openapi", slow(get_openapi))
    with fake_server() as server, ThreadPoolExecutor(1) as pool:
        try:
            page = pool.submit(httpx.get, server.url + path, timeout=30)
            assert begun.wait(10)
            assert httpx.get(f"{server.url}/health/live", timeout=5).status_code == 200
            labelled = httpx.post(f"{server.url}/v1/classify", json={"input": "x"}, timeout=5)
            assert labelled.status_code == 200
            assert not page.done()
        finally:
            may_end.set()
        assert page.result().status_code == 200 and page.result().text
