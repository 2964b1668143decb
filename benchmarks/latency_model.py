"""How near the predicted time of a call is to the true one, and what a decision costs.

Calls of random rows, lengths and steps run one after another in the runtime that serves; each is
predicted just before. A decision is whether a request is taken in, and at how many steps, behind
others that wait or run. It deliberately knows nothing of HTTP.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median

import numpy as np

from benchmarks.decisions import AHEAD, ASKED, DEADLINE, classify_seconds, write_seconds
from benchmarks.hindsight import TimedCall, errors
from benchmarks.options import Options, options, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target
from serve.bundle import Bundle
from serve.catalog import Catalog, Served
from serve.engine.cost import CostKey, LatencyModel
from serve.loading import measure_first_calls
from serve.runtime import open_model
from serve.runtime.session import usable_cores

NAME = "latency_model"
MOST_ROWS = 16
WANTED_ERROR, WANTED_US = 0.15, 50.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """One call, and the same call again."""

    call: TimedCall
    predicted_s: float
    again_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.call.seconds - 1)

    @property
    def noise(self) -> float:
        """The error of whoever says that it takes as long as it just did."""
        return abs(self.call.seconds / self.again_s - 1)


def main(arguments: Sequence[str]) -> int:
    parsed = parser(__doc__.partition("\n")[0]).parse_args(arguments)
    return run(NAME, arguments, parsed, partial(measure, options(parsed)))


def measure(chosen: Options, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    costs: list[tuple[str, str, int, float, float]] = []
    times = 50 if chosen.quick else 2000
    for bundle in chosen.read("classify"):
        name, latency = bundle.manifest.name, LatencyModel()
        calls = _predict(bundle, latency, 1.0 if chosen.quick else 80.0)
        least = errors([one.call for one in calls], usable_cores())
        rungs: list[Cell] = [*bundle.manifest.steps, "all"]
        for steps in rungs:
            some = [place for place, one in enumerate(calls) if steps in ("all", one.call.steps)]
            if some:
                kinds = ([one.error for one in calls], [one.noise for one in calls], least)
                shares = [_shares(sorted(kind[place] for place in some)) for kind in kinds]
                rows.append([name, steps, len(some), *chain(*shares)])
        p95 = _p95(sorted(one.error for one in calls))
        targets.append(Target(f"{name}: p95 error of a call", p95, "<=", WANTED_ERROR))
        for ahead in AHEAD:
            seconds = classify_seconds(bundle.manifest, latency, ahead, times)
            costs.append((name, DEADLINE, ahead, *_microseconds(seconds)))
    for bundle in chosen.read():
        if bundle.manifest.task == "generate" and bundle.latency is not None:
            latency = LatencyModel()
            latency.learn(bundle.manifest.name, bundle.latency)
            for asked in ASKED:
                for ahead in AHEAD:
                    seconds = write_seconds(bundle.manifest, latency, ahead, asked, times)
                    costs.append((bundle.manifest.name, asked, ahead, *_microseconds(seconds)))
    for name, asked, ahead, median_us, _ in costs:
        what = f"{name}: a decision on {asked}, behind {ahead}"
        targets.append(Target(what, median_us, "<=", WANTED_US, "µs"))
    errors_of = Table(
        "Error of the prediction, as a share of the true time; beside it the error of taking the "
        "time of the same call just before, and that of a fit in hindsight that knows all calls, "
        "also those just after, but the one in question: what the machine leaves to chance.",
        ("model", "steps", "calls", *_both(""), *_both("same call, "), *_both("hindsight, ")),
        rows,
    )
    cost_of = Table(
        "A decision, microseconds of processor time.",
        ("model", "asked", "ahead", "median µs", "p95 µs"),
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
        cost_key = CostKey(manifest.name, "classify", steps)
        predicted_s = latency.call_s(cost_key, rows, length)
        times_s = []
        for _ in range(2):
            begun_s = time.perf_counter()
            model.classifier(steps).run(tokens)
            times_s.append(time.perf_counter() - begun_s)
        call = TimedCall(steps, rows, length, begun_s, times_s[0])
        latency.observe(cost_key, rows, length, times_s[0])  # a server has each once
        if predicted_s is not None:
            found.append(Predicted(call, predicted_s, times_s[1]))
    return found


def _both(prefix: str) -> tuple[str, str]:
    return f"{prefix}median", f"{prefix}p95"


def _shares(ordered: Sequence[float]) -> list[Cell]:
    return [f"{100 * median(ordered):.1f} %", f"{100 * _p95(ordered):.1f} %"]


def _microseconds(seconds: Sequence[float]) -> tuple[float, float]:
    return 1e6 * median(seconds), 1e6 * _p95(sorted(seconds))


def _p95(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
