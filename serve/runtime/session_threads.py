"""How many threads the sessions of a classifier should have, found by timing one row.

A session's threads meet after every product, and wait for each other: what is small is done sooner
by one. Rows of a batch have threads of their own anyway. Knows classifiers only as far as they are
timed.
"""

import time
from collections.abc import Callable

from serve.runtime.model import Model
from serve.runtime.warm_rows import largest_row

_ALWAYS_ONE_S = 0.005  # an evaluation of one row that takes no longer has nothing to share
_WORTH = 0.8  # of the time of one thread: others could have had the cores
_TIMES = 3

Opening = Callable[[int], Model]  # the model, with so many threads a session from now on


def settle_threads(opening: Opening, most: int) -> None:
    """Leave the model with one thread or `most`, whichever answers one row sooner."""
    one_s, evaluations = _timed(opening(1))
    if one_s <= _ALWAYS_ONE_S * evaluations:
        return
    all_s, _ = _timed(opening(most))
    if all_s >= _WORTH * one_s:
        opening(1)


def _timed(model: Model) -> tuple[float, int]:
    """Seconds that one row takes at the fewest steps, and how many evaluations it is."""
    manifest = model.bundle.manifest
    rung, row = manifest.rungs[0], largest_row(manifest)[None]
    classifier = model.classifier(rung.steps)
    classifier.run(row)
    taken_s = []
    for _ in range(_TIMES):
        begun_s = time.perf_counter()
        classifier.run(row)
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s), rung.nfe
