"""How near the predicted time of a call is to the true one, and what a decision costs.

Calls of random rows, lengths and steps run one after another in the runtime that serves; each is
predicted just before. The decision is that of a request with a deadline, behind others that wait.
It deliberately knows nothing of HTTP.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from serve.bundle import Bundle
from serve.catalog import Catalog, Served
from serve.engine.admission import Admission
from serve.engine.classification import Classification
from serve.engine.events import Event
from serve.engine.first_calls import measure_first_calls
from serve.engine.work import Work
from serve.runtime import open_model
from serve.scheduler.job import Deadline, Job, LaneKey
from serve.scheduler.latency_model import LatencyModel, Series
from serve.scheduler.limits import Limits
from serve.scheduler.scheduler import Scheduler

NAME = "latency_model"
MOST_ROWS = 16
WANTED_ERROR, WANTED_US = 0.15, 50.0
QUEUES = (0, 16, 64, 255)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One call."""

    steps: int
    predicted_s: float
    true_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.true_s - 1)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    costs: list[Sequence[Cell]] = []
    for bundle in chosen.read("classify"):
        name = bundle.manifest.name
        latency = LatencyModel()
        calls = _predict(bundle, latency, 1.0 if chosen.quick else 40.0)
        for steps in bundle.manifest.steps:
            errors = sorted(call.error for call in calls if call.steps == steps)
            if errors:
                rows.append([name, steps, len(errors), *_shares(errors)])
        errors = sorted(call.error for call in calls)
        rows.append([name, "all", len(errors), *_shares(errors)])
        targets.append(Target(f"{name}: p95 error of a call", _p95(errors), "<=", WANTED_ERROR))
        for waiting in QUEUES:
            times = sorted(_decide(bundle, latency, waiting, 50 if chosen.quick else 2000))
            costs.append([name, waiting, median(times), _p95(times)])
            what = f"{name}: a decision behind {waiting}"
            targets.append(Target(what, median(times), "<=", WANTED_US, "µs"))
    errors_of = Table(
        "Error of the prediction, as a share of the true time.",
        ("model", "steps", "calls", "median", "p95"),
        rows,
    )
    cost_of = Table(
        "Whether a request with a deadline is taken in, microseconds of processor time.",
        ("model", "rows that wait", "median µs", "p95 µs"),
        costs,
    )
    return provenance.result(
        NAME, "The latency model", __doc__.split("\n\n")[1], [errors_of, cost_of], targets
    )


def _predict(bundle: Bundle, latency: LatencyModel, seconds: float) -> list[Predicted]:
    """Calls of a model, each predicted before it ran."""
    manifest = bundle.manifest
    model = open_model(bundle)
    model.warm_up()
    measure_first_calls(Catalog([Served.open(bundle, model)]), latency)
    chance = random.Random(0)
    longest = manifest.text_input.max_tokens
    found = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        steps = chance.choice(manifest.steps)
        rows, length = chance.randint(1, MOST_ROWS), chance.randint(longest // 8, longest)
        tokens = np.full((rows, length), manifest.text_tokenizer.vocab_size - 1, dtype=np.int64)
        series = Series(manifest.name, "classify", steps)
        predicted_s = latency.call_s(series, rows, length)
        begun_s = time.perf_counter()
        model.classifier(steps).run(tokens)
        true_s = time.perf_counter() - begun_s
        if predicted_s is not None:
            found.append(Predicted(steps, predicted_s, true_s))
        latency.observe(series, rows, length, true_s)
    return found


def _decide(bundle: Bundle, latency: LatencyModel, waiting: int, times: int) -> list[float]:
    """Microseconds of decisions about a request that comes behind so many."""
    chance = random.Random(waiting)
    limits = Limits(queue_requests=waiting + 1, degrade_wait_s=0.5)
    scheduler: Scheduler[Work] = Scheduler(limits, lambda key, rows, positions: 0, latency=latency)
    admission = Admission(scheduler, latency, limits)
    for _ in range(waiting):
        scheduler.add(_job(bundle, chance), 0.0)
    spent = []
    for _ in range(times):
        job = _job(bundle, chance)
        begun_s = time.thread_time()
        admission.check([job], 0.0)
        spent.append((time.thread_time() - begun_s) * 1e6)
    return spent


def _job(bundle: Bundle, chance: random.Random) -> Job[Work]:
    """A row that is given anything from half an hour to an hour."""
    manifest = bundle.manifest
    length = manifest.text_input.max_tokens // 2
    return Job(
        LaneKey(manifest.name, "classify", manifest.full_steps, late=True),
        Classification([[1] * length], _ignore),
        (length,),
        deadline=Deadline(0.0, chance.uniform(1800.0, 3600.0)),
        choices=manifest.steps,
    )


def _ignore(event: Event) -> None:
    pass


def _shares(ordered: Sequence[float]) -> list[Cell]:
    return [f"{100 * median(ordered):.1f} %", f"{100 * _p95(ordered):.1f} %"]


def _p95(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
