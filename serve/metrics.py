"""Every instrument of the server, on a registry of its own.

Knows names, units and labels; deliberately not when things happen: whoever knows that calls in.
Labels take few values: models, rungs, routes and codes, never anything that a client can invent.
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
    """What can be read off an engine at any time."""

    @property
    def queued(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def readiness(self) -> Mapping[str, bool]: ...


class ReadinessCollector(Collector):
    """Which models answer, read off an engine whenever it is asked for."""

    _labelnames = ("model",)  # as the library's own instruments have them

    def __init__(self, engine: EngineGauges) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The metric with a value for each model."""
        family = GaugeMetricFamily(
            "stepdial_model_ready",
            "Whether requests of a served model are welcome: 1, else 0.",
            labels=self._labelnames,
        )
        for model, ready in self._engine.readiness.items():
            family.add_metric([model], float(ready))
        return [family]


class FastHistogram(Histogram):
    """Finds the bucket of a value at once, where the library goes through them one by one."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count a value. There are no exemplars here."""
        self.observe_all(amount, 1)

    def observe_all(self, amount: float, times: int) -> None:
        """Count a value that came so many times."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


class FastCounter(Counter):
    """Counts without the library's questions, of which there is more than one for every token."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Count so many more. There are no exemplars here, and nothing is taken back."""
        self._value.inc(amount)


InstrumentT = TypeVar("InstrumentT", FastCounter, FastHistogram)


class LabelledMetric(Generic[InstrumentT]):
    """An instrument with labels, which finds those of values that came before at once."""

    def __init__(self, instrument: InstrumentT) -> None:
        self._instrument: InstrumentT = instrument
        self._found: dict[tuple[str, ...], InstrumentT] = {}

    def labels(self, *values: str) -> InstrumentT:
        """The one of these values."""
        found = self._found.get(values)
        if found is None:
            found = self._found[values] = self._instrument.labels(*values)
        return found


class Metrics:
    """All instruments, ready to be written to."""

    def __init__(self) -> None:
        # A gauge beside every counter, which nobody reads.
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=True)
        # Memory, processor time and open files of this process.
        ProcessCollector(namespace="stepdial", registry=self.registry)
        self._nfe: dict[tuple[str, int], int] = {}  # by key of the model and steps
        self._served: dict[str, tuple[str, ...]] = {}  # labels of what is served, by name
        self.requests = self._counter(
            "requests", "Requests answered, by route, model and status code.", "route model code"
        )
        self.request_seconds = self._seconds(
            "request",
            "From the arrival of a request that was answered to its last byte.",
            "route model steps",
        )
        self.refused_seconds = self._seconds(
            "refused",
            "From the arrival of a request to the error in place of its answer.",
            "route model code",
        )
        self.queue_seconds = self._seconds(
            "queue", "From the queue to the first call of a request.", "model steps"
        )
        self.first_token_seconds = self._seconds(
            "time_to_first_token", "From the queue to the first token.", "model steps"
        )
        self.inter_token_seconds = self._seconds(
            "inter_token", "Between two tokens of one answer.", "model steps"
        )
        self.batch_rows = LabelledMetric(
            FastHistogram(
                "stepdial_batch_rows",
                "Rows in a call of the runtime.",
                ("model", "kind"),
                buckets=ROWS,
                registry=self.registry,
            )
        )
        self.tokens = self._counter("tokens", "Tokens generated.", "model")
        self.steps = self._counter(
            "steps", "Steps taken, counted once a row and call.", "model kind"
        )
        self.evaluations = self._counter(
            "velocity_evaluations", "Velocity evaluations, once a row and call.", "model kind"
        )
        self.decisions = self._counter(
            "budget_decisions", "Budgets decided, by reason.", "model reason steps"
        )
        self.degraded = self._counter(
            "degraded", "Requests served with fewer steps because of load.", "model"
        )
        self.rejected = self._counter("rejected", "Requests refused, by error code.", "reason")
        self.deadlines = self._counter(
            "deadlines", "Requests taken in that came with a deadline.", "model"
        )
        self.lapsed = self._counter(
            "lapsed", "Requests taken in whose deadline passed before the answer.", "model"
        )
        self.cancelled = Counter(
            "stepdial_cancelled",
            "Requests dropped because their client had gone.",
            registry=self.registry,
        )
        self.evicted = Counter(
            "stepdial_connections_evicted",
            "Idle connections that were closed to make room for others.",
            registry=self.registry,
        )
        self.log_lines_dropped = Counter(
            "stepdial_log_lines_dropped",
            "Lines of the log that nobody took in time.",
            registry=self.registry,
        )
        self.runtime_failures = self._counter(
            "runtime_failures", "Calls of the runtime that threw.", "model"
        )
        self.late_calls = self._counter(
            "late_calls",
            "Calls of the runtime that were asked to end, since they took too long.",
            "model",
        )
        self.terminated_calls = self._counter(
            "terminated_calls", "Late calls that ended when they were asked to.", "model"
        )
        self.drafted = self._counter(
            "speculative_drafted", "Tokens drafted by a row that ran ahead.", "model"
        )
        self.accepted = self._counter(
            "speculative_accepted", "Drafts that the full steps confirmed.", "model"
        )
        self.rechecked = self._counter(
            "rechecked",
            "Answers under max_disagreement that were compared with those of all steps.",
            "model max_disagreement",
        )
        self.disagreed = self._counter(
            "disagreed", "Of those, the ones that differed.", "model max_disagreement"
        )
        self._promised = Gauge(
            "stepdial_promised_disagreement",
            "The share of answers that may differ under max_disagreement.",
            ("model", "max_disagreement"),
            registry=self.registry,
        )
        self._model_info = Gauge(
            "stepdial_model_info",
            "The models that are served; always 1.",
            ("model", "task", "method", "precision", "full_steps"),
            registry=self.registry,
        )

    def serve(self, model: str, manifest: Manifest) -> None:
        """Show a model, and every decision it can make, before the first one."""
        labels = (
            manifest.name,
            manifest.task,
            manifest.method,
            manifest.precision,
            str(manifest.full_steps),
        )
        if manifest.name in self._served:
            self.hide(manifest.name)
        self._served[manifest.name] = labels
        self._model_info.labels(*labels).set(1)
        self.degraded.labels(manifest.name)
        self.deadlines.labels(manifest.name)
        self.lapsed.labels(manifest.name)
        if manifest.task == "generate":
            self.drafted.labels(manifest.name)
            self.accepted.labels(manifest.name)
        for rung in manifest.rungs:
            self._nfe[model, rung.steps] = rung.nfe
        for level in manifest.calibration.levels if manifest.calibration else ():
            promise = level.max_disagreement
            self._promised.labels(manifest.name, str(promise)).set(promise)

    def hide(self, name: str) -> None:
        """No model of this name is served any more. What was counted of it stays."""
        self._model_info.remove(*self._served.pop(name))

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._nfe = {key: nfe for key, nfe in self._nfe.items() if key[0] != model}

    def watch(self, engine: EngineGauges, cache_limit_bytes: int) -> None:
        """Read the gauges off an engine whenever they are asked for."""
        self._gauge("queue_depth", "Requests that wait, for a model or to be read.").set_function(
            lambda: engine.queued
        )
        self._gauge("in_flight", "Requests that run in a model, or are being read.").set_function(
            lambda: engine.running
        )
        self._gauge("cache_bytes", "Cache memory of generations.").set_function(
            lambda: engine.cache_bytes
        )
        self.registry.register(ReadinessCollector(engine))
        self._gauge("cache_limit_bytes", "The limit of stepdial_cache_bytes.").set(
            cache_limit_bytes
        )

    def call(self, lane: LaneKey, kind: str, rows: int, evaluations: int | None) -> None:
        """Count a call of the runtime, and the evaluations of its rows where they may be fewer."""
        self.batch_rows.labels(lane.name, kind).observe(rows)
        nfe = self._nfe.get((lane.model, lane.steps), lane.steps)
        spent = rows * nfe if evaluations is None else evaluations
        self.steps.labels(lane.name, kind).inc(spent * lane.steps / nfe)
        self.evaluations.labels(lane.name, kind).inc(spent)

    def stepped(self, lane: LaneKey, kind: str, rows: int, steps: int) -> None:
        """Count steps that rows of a lane took in a call."""
        nfe = self._nfe.get((lane.model, lane.steps), lane.steps)
        self.steps.labels(lane.name, kind).inc(rows * steps)
        self.evaluations.labels(lane.name, kind).inc(rows * steps * nfe / lane.steps)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, labels: str) -> LabelledMetric[FastCounter]:
        return LabelledMetric(
            FastCounter(f"stepdial_{name}", about, labels.split(), registry=self.registry)
        )

    def _seconds(self, name: str, about: str, labels: str) -> LabelledMetric[FastHistogram]:
        return LabelledMetric(
            FastHistogram(
                f"stepdial_{name}_seconds",
                about,
                labels.split(),
                buckets=SECONDS,
                registry=self.registry,
            )
        )

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"stepdial_{name}", about, registry=self.registry)
