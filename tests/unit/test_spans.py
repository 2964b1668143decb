"""Spans of requests that were refused: nothing of them waited or ran."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve.tracing import Traces
from tests.fake_server import FakeServer, fake_server


def ask(server: FakeServer) -> int:
    body = {"model": "tiny-generate", "prompt": "abc", "max_tokens": 3, "steps": 2}
    return httpx.post(f"{server.url}/v1/generate", json=body, timeout=20).status_code


def test_a_refused_request_has_no_wait_in_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("serve.app.open_traces", lambda _: Traces(provider, exporter))
    with fake_server(queue_limit=1, decode_rows=1) as server:
        server.mood.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, server)
            server.wait_for(running=1)
            second = pool.submit(ask, server)
            server.wait_for(running=1, queued=1)
            assert ask(server) == 429
            server.mood.gate.set()
            assert [one.result() for one in (first, second)] == [200, 200]
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == [
        *["POST /v1/generate"] * 3,
        *["decoding"] * 2,
        *["queue"] * 2,
        *["reading"] * 2,
    ]
