"""OpenTelemetry traces: one span a request, with its wait and its computation inside.

Off, and no SDK is imported, unless OpenTelemetry's standard variables name an endpoint. Spans are
made when a request is over, from times that are recorded anyway.
"""

import logging
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from serve.engine.job import Job
from serve.exchange import Exchange
from serve.settings import SettingsError
from stepdial import install_command

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_log = logging.getLogger("stepdial")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_TRACER = "stepdial"
_FLUSH_S = 2.0
# Their warnings repeat what clients send in `baggage` and `tracestate`: many lines a request.
_REPEATING = ("opentelemetry.baggage", "opentelemetry.trace")


class Traces:
    """Where spans go."""

    def __init__(self, provider: "TracerProvider", exporter: "SpanExporter") -> None:
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer(_TRACER)

    def record(
        self,
        exchange: Exchange,
        name: str,
        status: int,
        attributes: Mapping[str, str | int],
        ended_s: float,
    ) -> str:
        """Make the spans of a finished request; returns the trace id."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        clock = _Clock()
        headers: dict[str, list[str]] = {}
        for key, value in exchange.header_list:
            headers.setdefault(str(key, "latin-1"), []).append(str(value, "latin-1"))
        span = self._tracer.start_span(
            name,
            extract(headers),  # the client's span is the parent
            SpanKind.SERVER,
            attributes,
            start_time=clock.ns(exchange.arrived_s),
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for job in exchange.jobs:
                self._record_job(job, exchange.computed_s or ended_s, inside, clock)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(clock.ns(ended_s))
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what is left, within a time limit."""
        # Otherwise it is tried again and again if nobody listens.
        timer = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()

    def _record_job(self, job: Job, ended_s: float, inside: "Context", clock: "_Clock") -> None:
        begun_s, first_s = job.started_s, job.first_token_s
        parts: list[tuple[str, float | None, float | None]] = [("queue", job.queued_s, begun_s)]
        if begun_s is not None and job.lane.kind == "generate":
            parts += [("reading", begun_s, first_s), ("decoding", first_s, ended_s)]
        else:
            parts += [("steps", begun_s, ended_s)]
        for name, from_s, to_s in parts:
            if from_s is None:
                break
            child = self._tracer.start_span(
                name,
                inside,
                attributes={"stepdial.steps": job.lane.steps},
                start_time=clock.ns(from_s),
            )
            child.end(clock.ns(ended_s if to_s is None else to_s))


class _Clock:
    """Converts the performance counter to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._now_ns, self._now_s = time.time_ns(), time.perf_counter()

    def ns(self, at_s: float) -> int:
        return self._now_ns - int((self._now_s - at_s) * 1e9)


def open_traces(environ: Mapping[str, str]) -> Traces | None:
    """Traces as the variables ask; None if they name no endpoint or switch it off."""
    if (
        not any(environ.get(name) for name in _ENDPOINTS)
        or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    ):
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise SettingsError(
            f"traces are sent as http/protobuf only, not {protocol}: unset {_PROTOCOLS[-1]}, and "
            "name an HTTP port of the collector, usually 4318"
        )
    if not all(map(_installed, _PACKAGES)):
        _log.warning(
            "%s is set, but OpenTelemetry is not installed, so there are no traces: %s",
            *(next(name for name in _ENDPOINTS if environ.get(name)), install_command("otel")),
        )
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for name in _REPEATING:
        logging.getLogger(name).setLevel(logging.ERROR)
    given = environ.get("OTEL_RESOURCE_ATTRIBUTES", "") + "," + environ.get("OTEL_SERVICE_NAME", "")
    named = "service.name=" in given or not given.endswith(",")
    resource = Resource.create({} if named else {SERVICE_NAME: _TRACER})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, exporter)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
