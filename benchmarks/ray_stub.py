"""Stepdial on Ray with a model that waits instead of computing: what is left is Ray and HTTP.

    python -m benchmarks.ray_stub BUNDLE --nodes 2

Knows how the model of a replica is replaced; everything else is the real thing.
"""

import sys
import time

import numpy as np

from benchmarks.ray_ratio import WAIT_S
from deploy.ray import local
from deploy.ray.engines import Engines, Held
from serve.runtime.protocol import FloatArray, RowArray


class WaitingRung:
    """A rung of a classifier that takes its time and thinks nothing."""

    def __init__(self, labels: int) -> None:
        self._labels = labels

    def run(self, rows: RowArray) -> FloatArray:
        time.sleep(WAIT_S)
        return np.zeros((len(rows), self._labels), dtype=np.float32)


class WaitingEngines(Engines):
    """A replica whose classifiers wait."""

    async def _load(self, name: str) -> Held:
        held = await super()._load(name)
        served = self._engine.catalog.find(name)
        rung = WaitingRung(len(served.manifest.labels or ()))
        # Of this one model only, so that what is measured around it stays as it is.
        served.model.classifier = lambda steps: rung  # type: ignore[method-assign]
        return held


if __name__ == "__main__":
    sys.exit(local.main(sys.argv[1:], WaitingEngines))
