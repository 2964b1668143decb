"""The Prometheus metrics of the server, on a registry of their own.

Label values are models, rungs, routes and codes, never anything that a client can invent.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.bundle import Manifest
from serve.engine.job import LaneKey

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class EngineGauges(Protocol):
    """The values of an engine that gauges read at scrape time."""

    @property
    def queued(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def readiness(self) -> Mapping[str, bool]: ...


class ReadinessCollector(Collector):
    """Whether each model is ready, read from the engine at scrape time."""

    _labelnames = ("model",)  # the name that prometheus_client's own metrics use

    def __init__(self, engine: EngineGauges) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The metric, with a value for each model."""
        family = GaugeMetricFamily(
            "stepdial_model_ready",
            "1 if a served model takes requests, else 0.",
            labels=self._labelnames,
        )
        for model, ready in self._engine.readiness.items():
            family.add_metric([model], float(ready))
        return [family]


class BatchHistogram(Histogram):
    """A histogram that takes the same value several times at once, for the rows of a batch."""

    def observe_all(self, amount: float, times: int) -> None:
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


InstrumentT = TypeVar("InstrumentT", Counter, BatchHistogram)


class LabelledMetric(Generic[InstrumentT]):
    """A metric with labels that remembers its children."""

    def __init__(self, instrument: InstrumentT) -> None:
        self._instrument: InstrumentT = instrument
        self._found: dict[tuple[str, ...], InstrumentT] = {}

    def labels(self, *values: str) -> InstrumentT:
        """The child with these label values."""
        found = self._found.get(values)
        if found is None:
            found = self._found[values] = self._instrument.labels(*values)
        return found


class Metrics:
    """All metrics of the server."""

    def __init__(self) -> None:
        # Switches off the `_created` gauge that the library adds to every counter.
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=True)
        # Memory, processor time and open files of this process.
        ProcessCollector(namespace="stepdial", registry=self.registry)
        self.requests = self._counter(
            "requests",
            "Requests by route, model and status code. What is refused before its head is read is "
            "in stepdial_rejected_total only.",
            "route model code",
        )
        self.request_seconds = self._seconds(
            "request",
            "Time from the arrival of a request to the last byte of its answer, if it succeeded.",
            "route model steps",
        )
        self.refused_seconds = self._seconds(
            "refused",
            "Time from the arrival of a request to its error response.",
            "route model code",
        )
        self.queue_seconds = self._seconds(
            "queue",
            "Time that a request, or each of its texts to generate, waited in the queue before its "
            "first model call.",
            "model steps",
        )
        self.first_token_seconds = self._seconds(
            "time_to_first_token", "Time from entering the queue to the first token.", "model steps"
        )
        self.inter_token_seconds = self._seconds(
            "inter_token", "Time between two tokens of one answer.", "model steps"
        )
        self.batch_rows = LabelledMetric(
            BatchHistogram(
                "stepdial_batch_rows",
                "Rows (batch size) of a model call.",
                ("model", "kind"),
                buckets=ROWS,
                registry=self.registry,
            )
        )
        self.tokens = self._counter("tokens", "Tokens generated.", "model")
        self.steps = self._counter(
            "steps",
            "Steps taken, summed over the rows of every model call; an early answer counts what it "
            "evaluated.",
            "model kind",
        )
        self.evaluations = self._counter(
            "velocity_evaluations",
            "Velocity evaluations (the true cost), summed over the rows of every model call.",
            "model kind",
        )
        self.decisions = self._counter(
            "budget_decisions",
            "Requests by the step count that was chosen and the reason for it.",
            "model reason steps",
        )
        self.degraded = self._counter(
            "degraded", "Requests that got fewer steps because of load.", "model"
        )
        self.rejected = self._counter(
            "rejected", "Requests that ended with an error, by its code.", "reason"
        )
        self.deadlines = self._counter(
            "deadlines", "Accepted requests that had a deadline.", "model"
        )
        self.lapsed = self._counter(
            "lapsed",
            "Accepted requests whose deadline passed before the answer was complete.",
            "model",
        )
        self.cancelled = Counter(
            "stepdial_cancelled",
            "Requests cancelled because the client disconnected.",
            registry=self.registry,
        )
        self.evicted = Counter(
            "stepdial_connections_evicted",
            "Idle connections closed to make room for new ones.",
            registry=self.registry,
        )
        self.log_lines_dropped = Counter(
            "stepdial_log_lines_dropped",
            "Log lines dropped because the log output was too slow.",
            registry=self.registry,
        )
        self.runtime_failures = self._counter(
            "runtime_failures", "Model calls that failed with an exception.", "model"
        )
        self.late_calls = self._counter(
            "late_calls",
            "Model calls that were stuck and therefore cancelled.",
            "model",
        )
        self.terminated_calls = self._counter(
            "terminated_calls",
            "Stuck model calls that ended with an error after they were cancelled.",
            "model",
        )
        self.drafted = self._counter(
            "speculative_drafted", "Draft tokens proposed by speculation.", "model"
        )
        self.accepted = self._counter(
            "speculative_accepted", "Draft tokens that the full steps accepted.", "model"
        )
        self.rechecked = self._counter(
            "rechecked",
            "max_disagreement answers that were computed again with all steps.",
            "model max_disagreement",
        )
        self.disagreed = self._counter(
            "disagreed",
            "Answers among stepdial_rechecked that differed from those of all steps.",
            "model max_disagreement",
        )
        self._promised = Gauge(
            "stepdial_promised_disagreement",
            "Largest share of answers that may differ, as certified for max_disagreement.",
            ("model", "max_disagreement"),
            registry=self.registry,
        )
        self._model_info = Gauge(
            "stepdial_model_info",
            "A served model and its facts; always 1.",
            ("model", "task", "method", "precision", "full_steps"),
            registry=self.registry,
        )

    def serve(self, manifest: Manifest) -> None:
        """Show a model and its counters before the first request."""
        self.hide(manifest.name)
        self._model_info.labels(
            manifest.name,
            manifest.task,
            manifest.method,
            manifest.precision,
            str(manifest.full_steps),
        ).set(1)
        self.degraded.labels(manifest.name)
        self.deadlines.labels(manifest.name)
        self.lapsed.labels(manifest.name)
        self.runtime_failures.labels(manifest.name)
        self.late_calls.labels(manifest.name)
        self.terminated_calls.labels(manifest.name)
        if manifest.task == "generate":
            self.drafted.labels(manifest.name)
            self.accepted.labels(manifest.name)
        for level in manifest.calibration.levels if manifest.calibration else ():
            promise = level.max_disagreement
            self._promised.labels(manifest.name, str(promise)).set(promise)

    def hide(self, name: str) -> None:
        """Stop showing a model that is no longer served. Its counters stay."""
        self._model_info.remove_by_labels({"model": name})
        self._promised.remove_by_labels({"model": name})

    def watch(self, engine: EngineGauges, cache_limit_bytes: int) -> None:
        """Read the gauges from this engine at scrape time."""
        self._gauge(
            "queue_depth",
            "Requests waiting, for a model or for their body to be read; of several texts to "
            "write, each counts.",
        ).set_function(lambda: engine.queued)
        self._gauge(
            "in_flight",
            "Requests running in a model, or whose body is being read; of several texts to write, "
            "each counts.",
        ).set_function(lambda: engine.running)
        self._gauge(
            "cache_bytes", "Memory of the KV caches of generations, in bytes."
        ).set_function(lambda: engine.cache_bytes)
        self.registry.register(ReadinessCollector(engine))
        self._gauge("cache_limit_bytes", "Limit of stepdial_cache_bytes (--cache-mb).").set(
            cache_limit_bytes
        )

    def call(self, lane: LaneKey, kind: str, rows: int, spent: int, nfe: int) -> None:
        """Count a model call that spent so many evaluations; a row of all steps takes `nfe`."""
        self.batch_rows.labels(lane.name, kind).observe(rows)
        self.steps.labels(lane.name, kind).inc(spent * lane.steps / nfe)
        self.evaluations.labels(lane.name, kind).inc(spent)

    def decoded(self, lane: LaneKey, rows: int, steps: int, nfe: int) -> None:
        """Count the steps that rows of a lane took in a decode call."""
        self.steps.labels(lane.name, "decode").inc(rows * steps)
        self.evaluations.labels(lane.name, "decode").inc(rows * steps * nfe / lane.steps)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, labels: str) -> LabelledMetric[Counter]:
        return LabelledMetric(
            Counter(f"stepdial_{name}", about, labels.split(), registry=self.registry)
        )

    def _seconds(self, name: str, about: str, labels: str) -> LabelledMetric[BatchHistogram]:
        return LabelledMetric(
            BatchHistogram(
                f"stepdial_{name}_seconds",
                about,
                labels.split(),
                buckets=SECONDS,
                registry=self.registry,
            )
        )

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"stepdial_{name}", about, registry=self.registry)
