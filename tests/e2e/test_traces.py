"""Traces of the real process, as a collector of OpenTelemetry receives them."""

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve import tracing
from serve.settings import SettingsError
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle
from tests.server_process import server_process

FOLDERS = [classify_bundle().folder, generate_bundle().folder]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector(ThreadingHTTPServer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.exports: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces" and isinstance(self.server, Collector)
        self.server.exports.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_is_a_span_with_what_it_waited_for_and_what_was_computed() -> None:
    with collector() as found:
        environment = {ENDPOINT: found.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with server_process(FOLDERS, environment=environment) as server:
            begun_ns = time.time_ns()
            with httpx.Client(base_url=server.url, timeout=30) as client:
                asked = {"prompt": "To be", "max_tokens": 40, "steps": 4, "stream": True}
                parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
                client.post("/v1/generate", json=asked, headers=parent)
                client.post("/v1/classify", json={"input": "good", "steps": 2})
                client.post("/v1/classify", json={"input": "good", "steps": 3})
                client.get("/health/ready")
            ended_ns = time.time_ns()
            server.terminate()
            assert server.wait() == 0
            assert "opentelemetry" not in server.rest_of_output()
        spans = found.spans()
        (resource,) = {str(export.resource_spans[0].resource) for export in found.exports}
        assert '"stepdial"' in resource
    tops = {span.name: [one for one in spans if one.name == span.name] for span in spans}
    assert sorted(span.name for span in spans) == [
        *("POST /v1/classify", "POST /v1/classify", "POST /v1/generate"),
        *("decoding", "queue", "queue", "reading", "steps"),
    ]
    (generate,) = tops["POST /v1/generate"]
    assert (generate.trace_id.hex(), generate.parent_span_id.hex()) == (TRACE, PARENT)
    known = {"stepdial.id": "mine", "stepdial.model": "tiny-generate", "stepdial.steps": 4}
    known |= {"stepdial.reason": "exact", "http.response.status_code": 200}
    assert known.items() <= attributes(generate).items()
    children = [span for span in spans if span.parent_span_id == generate.span_id]
    children.sort(key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in children] == ["queue", "reading", "decoding"]
    for before, after in pairwise(children):
        assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 2000
    for span in (generate, *children):
        assert begun_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= ended_ns
        assert generate.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= generate.end_time_unix_nano
    good, refused = tops["POST /v1/classify"]
    assert [
        span.name
        for span in sorted(spans, key=lambda one: one.start_time_unix_nano)
        if span.parent_span_id == good.span_id
    ] == ["queue", "steps"]
    assert attributes(refused)["http.response.status_code"] == 422
    assert good.trace_id != refused.trace_id and not good.parent_span_id


def test_what_comes_with_a_trace_is_passed_on_and_never_logged() -> None:
    parent = ("traceparent", f"00-{TRACE}-{PARENT}-01")
    states = [("tracestate", "one=1"), ("tracestate", "two=2")]
    odd = [("tracestate", "a secret"), ("baggage", ",".join(["a secret"] * 100))]
    with collector() as found:
        environment = {ENDPOINT: found.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with server_process(FOLDERS[:1], environment=environment) as server:
            for headers in ([parent, *states], [parent, *odd]):
                answer = httpx.get(f"{server.url}/v1/models", headers=headers)
                assert answer.status_code == 200
            server.terminate()
            assert server.wait() == 0
            assert "secret" not in server.rest_of_output()
        assert [span.trace_state for span in found.spans()] == ["one=1,two=2", ""]


def test_a_collector_that_is_gone_holds_up_neither_answers_nor_the_end() -> None:
    environment = {ENDPOINT: "http://127.0.0.1:9"}
    with server_process(FOLDERS[:1], environment=environment) as server:
        answer = httpx.post(f"{server.url}/v1/classify", json={"input": "good"})
        assert answer.status_code == 200
        begun_s = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        assert time.monotonic() - begun_s < 5


def test_no_sdk_is_imported_while_it_is_off() -> None:
    code = (
        "import sys; import serve.app, serve.tracing; "
        "assert serve.tracing.open_traces({}) is None; "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) "
        "for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "extra", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {ENDPOINT: ""}]
)
def test_the_standard_variables_switch_it_off(extra: dict[str, str]) -> None:
    assert tracing.open_traces({ENDPOINT: "http://127.0.0.1:9"} | extra) is None


def test_another_protocol_is_refused_and_a_missing_extra_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on = {ENDPOINT: "http://127.0.0.1:9"}
    with pytest.raises(SettingsError, match="http/protobuf only, not grpc"):
        tracing.open_traces(on | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    monkeypatch.setattr(tracing, "_PACKAGES", ("opentelemetry_that_is_not_there.sdk",))
    assert tracing.open_traces(on) is None
    assert "pip install -e '.[otel]'" in caplog.text
