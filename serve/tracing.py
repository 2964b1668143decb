"""Traces for OpenTelemetry: a span a request, with what it waited for and what was computed below.

Off, and no SDK imported, unless the standard variables of OpenTelemetry name an endpoint. Spans
are made when the request is over, of times that were noted anyway. Knows that library; deliberately
neither routes nor models.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from serve.engine.job import Job
from serve.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_NAME = "stepdial"
_FLUSH_S = 2.0
_log = logging.getLogger("stepdial")


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that is over; times are those of the performance counter."""

    name: str
    headers: Mapping[str, str]
    arrived_s: float
    ended_s: float
    status: int
    attributes: Mapping[str, str | int]
    jobs: Sequence[Job[Any]]
    computed_s: float | None  # when the last call of the model was over, if that is known


class Traces:
    """Where spans go."""

    def __init__(self, provider: "TracerProvider", exporter: "SpanExporter") -> None:
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer(_NAME)

    def record(self, request: FinishedRequest) -> str:
        """Make the spans of a request; returns the id of its trace."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        clock = _Clock()
        span = self._tracer.start_span(
            request.name,
            extract(request.headers),  # the client's own span is the parent
            SpanKind.SERVER,
            request.attributes,
            start_time=clock.ns(request.arrived_s),
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for job in request.jobs:
                self._record_job(job, request.computed_s or request.ended_s, inside, clock)
        if request.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(clock.ns(request.ended_s))
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what has not been sent yet, unless that takes too long."""
        # Else it would be tried again and again where nobody listens.
        timer = threading.Timer(_FLUSH_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()

    def _record_job(
        self, job: Job[Any], ended_s: float, inside: "Context", clock: "_Clock"
    ) -> None:
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
    """The performance counter as nanoseconds since 1970."""

    def __init__(self) -> None:
        self._now_ns, self._now_s = time.time_ns(), time.perf_counter()

    def ns(self, at_s: float) -> int:
        return self._now_ns - int((self._now_s - at_s) * 1e9)


def open_traces(environ: Mapping[str, str]) -> Traces | None:
    """Traces as the variables ask for them; None where they name no endpoint or switch it off."""
    if (
        not any(environ.get(name) for name in _ENDPOINTS)
        or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    ):
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise SettingsError(
            f"traces leave as http/protobuf only, not {protocol}: unset {_PROTOCOLS[-1]}, and name "
            "a port of the collector that takes HTTP, which is usually 4318"
        )
    if not all(map(_installed, _PACKAGES)):
        _log.warning(
            "%s is set, but OpenTelemetry is not installed, so there are no traces: install "
            "stepdial[otel]",
            next(name for name in _ENDPOINTS if environ.get(name)),
        )
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    told = environ.get("OTEL_RESOURCE_ATTRIBUTES", "") + "," + environ.get("OTEL_SERVICE_NAME", "")
    named = "service.name=" in told or not told.endswith(",")
    resource = Resource.create({} if named else {SERVICE_NAME: _NAME})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, exporter)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it lies in
        return False
