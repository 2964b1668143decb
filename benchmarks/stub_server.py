"""The real server in front of a classifier that only waits: so long a call, and so long a row.

For other benchmarks (`benchmarks.server.running_stub`). What it serves is told by a bundle; the
answers mean nothing. A process of its own, ended by a signal like `stepdial serve`.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.server import READY_LINE
from serve.app import create_app
from serve.bundle import Bundle, BundleError, read_bundle
from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.loading import measure_first_calls
from serve.metrics import Metrics
from serve.runtime import Mix, Model
from serve.runtime.protocol import (
    Classifier,
    Decoder,
    FloatArray,
    RowArray,
    StepClassifier,
    Translator,
)
from serve.server import Server, bind, keep_memory_low, listen
from serve.settings import Settings

_SPIN_S = 0.0001  # a sleep ends later than asked by less than this


class StubClassifier:
    """Waits, and finds every label equally likely."""

    def __init__(self, bundle: Bundle, call_s: float, row_s: float) -> None:
        self._labels = len(bundle.manifest.labels or ())
        self._call_s, self._row_s = call_s, row_s

    def run(self, rows: RowArray) -> FloatArray:
        end_s = time.perf_counter() + self._call_s + self._row_s * len(rows)
        wait_s = end_s - time.perf_counter() - _SPIN_S
        if wait_s > 0:  # even a sleep of no time lets another thread run, and waits for it
            time.sleep(wait_s)
        while time.perf_counter() < end_s:
            pass
        return np.zeros((len(rows), self._labels), np.float32)

    def embed(self, rows: RowArray) -> FloatArray:
        raise BundleError("a stub has no embeddings")


class StubModel:
    """A model of classifiers that wait."""

    def __init__(self, bundle: Bundle, call_s: float, row_s: float) -> None:
        self.bundle = bundle
        self.opening = False
        self.most_parts = 1
        self.single_steps = False
        self._classifier = StubClassifier(bundle, call_s, row_s)

    def classifier(self, steps: int) -> Classifier:
        return self._classifier

    def step_classifier(self, steps: int) -> StepClassifier:
        raise BundleError("a stub has no single steps")

    def decoder(self, steps: int) -> Decoder:
        raise BundleError("a stub only classifies")

    def translator(self, steps: int) -> Translator:
        raise BundleError("a stub only classifies")

    def mix(self) -> Mix | None:
        return None

    def close(self) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def resume(self) -> None:
        pass


def main(arguments: Sequence[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("bundle", type=Path, help="folder of the bundle whose place the stub takes")
    made.add_argument("--call-ms", type=float, default=5.0)
    made.add_argument("--row-ms", type=float, default=0.5)
    parsed = made.parse_args(arguments)
    keep_memory_low()
    sys.setswitchinterval(0.0005)
    bundle = read_bundle(parsed.bundle)
    model: Model = StubModel(bundle, parsed.call_ms / 1000, parsed.row_ms / 1000)
    catalog = Catalog([Served.open(bundle, model)])
    settings = Settings(port=0)
    engine = Engine(catalog, settings.limits, Metrics())
    for served in catalog:
        measure_first_calls(served, engine.cost(served))
    gc.collect()
    gc.freeze()

    def listening(url: str) -> None:
        print(f"on {url} (a stub)\n{READY_LINE}", flush=True)

    with bind(settings.host, settings.port) as listener:
        listen(listener)
        Server(settings, create_app(settings, engine), engine, listening).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
