"""How many threads the sessions of a model should have, found by timing one row.

A session's threads meet after every product, and wait for each other: what is small is done sooner
by one. Rows of a classifier's batch have threads of their own anyway; those of a decoder have none,
so only the step of a single row is asked about. Knows models only as far as they are timed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from serve.bundle import Manifest
from serve.runtime.interruptible import InterruptibleSession
from serve.runtime.model import Model
from serve.runtime.ort_decoder import OrtDecoder
from serve.runtime.ort_steps import StepSessions
from serve.runtime.warm_rows import largest_row, largest_tokens

_ALWAYS_ONE_S = 0.005  # an evaluation of one row that takes no longer has nothing to share
_WORTH = 0.8  # of the time of one thread: others could have had the cores
_TIMES = 3
_SMALL_BYTES = 16 << 20  # of weights; to read more takes longer than threads take to meet
_ROUNDS, _LEAST_ROUNDS = 15, 3
_NO_SLOWER = 1.03  # within what a measurement is off; the other cores are left to others

Opening = Callable[[int], Model]  # the model, with so many threads a session from now on


def settle_threads(opening: Opening, most: int) -> None:
    """Leave the model with one thread or `most`, whichever answers one row sooner."""
    one_s, evaluations = _timed(opening(1))
    if one_s <= _ALWAYS_ONE_S * evaluations:
        return
    all_s, _ = _timed(opening(most))
    if all_s >= _WORTH * one_s:
        opening(1)


def settle_single(
    sessions: StepSessions, open_alone: Callable[[], InterruptibleSession], manifest: Manifest
) -> StepSessions:
    """These sessions, with one of one thread for a single row if that is no slower."""
    most = manifest.text_input.max_tokens
    middle = most // 2  # positions cached: attention is a share of the work as it is on average
    rounds = min(_ROUNDS, (most - middle) // 2)
    if rounds < _LEAST_ROUNDS or manifest.files[manifest.weights].bytes > _SMALL_BYTES:
        return sessions
    alone = replace(sessions, single=open_alone())
    tokens = largest_tokens(manifest)
    longest = manifest.rungs[-1]
    batches = [OrtDecoder(one, manifest, longest).open_batch() for one in (sessions, alone)]
    for batch in batches:
        batch.add(tokens[:middle])
    taken = interleaved([partial(batch.step, tokens[:1]) for batch in batches], rounds)
    return alone if taken[1] <= _NO_SLOWER * taken[0] else sessions


def interleaved(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each once its threads are awake, all in turn in every round."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, times in zip(runs, taken, strict=True):
            run()
            begun_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun_s)
    return [median(times) for times in taken]


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
