"""How many threads the sessions of a model should have, found by timing one row.

A session's threads meet after every product, and wait for each other: what is small is done sooner
by one. Rows of a batch have threads of their own anyway. Knows models only as far as they are
timed.
"""

import time
from collections.abc import Callable

import numpy as np

from serve.runtime.protocol import Model
from serve.runtime.warm_rows import largest_row, largest_tokens

_ALWAYS_ONE_S = 0.005  # an evaluation of one row that takes no longer has nothing to share
_WORTH = 0.8  # of the time of one thread: others could have had the cores
_PROMPT, _WRITTEN = 64, 16  # tokens of a generation that stands for all
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
    """Seconds that one row takes at the fewest steps, and how many calls of evaluations it is."""
    call, evaluations = _call(model)
    call()
    taken_s = []
    for _ in range(_TIMES):
        begun_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - begun_s)
    return min(taken_s), evaluations


def _call(model: Model) -> tuple[Callable[[], object], int]:
    manifest = model.bundle.manifest
    rung = manifest.rungs[0]
    if manifest.task == "classify":
        row, classifier = largest_row(manifest)[None], model.classifier(rung.steps)
        return lambda: classifier.run(row), rung.nfe
    tokens = largest_tokens(manifest)
    if manifest.task == "translate":
        translator = model.translator(rung.steps)
        return lambda: translator.read(tokens), rung.nfe
    decoder = model.decoder(rung.steps)
    prompt = tokens[: max(1, min(_PROMPT, len(tokens) - _WRITTEN))]
    written = tokens[len(prompt) : len(prompt) + _WRITTEN]

    def generate() -> None:
        batch = decoder.open_batch()
        batch.add(prompt)
        for token in written:
            batch.step(np.array([token]))

    return generate, rung.nfe * (1 + len(written))
