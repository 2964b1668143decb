"""Times a few calls of each rung before the first request: how fast this machine is.

What was measured elsewhere gives the shape of the times, these give their size, the same for all
rungs of a model in calls of as many rows: one that seems slow by chance would never be chosen, and
so never be corrected. Where rows run in parts, a call in one part and one in several are timed.
Knows models and the latency model; nothing of requests.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from serve.catalog import Served
from serve.engine.cost import LatencyModel, Series
from serve.inputs.rows import row_length
from serve.parts import rows_for
from serve.runtime.protocol import largest_row, largest_tokens

_TIMES = 3
_PROMPT_TOKENS = 16
_MOST_ROWS = 16  # of a call that is timed


class Timed(NamedTuple):
    """A call."""

    series: Series
    length: int
    seconds: float
    rows: int = 1


def measure_first_calls(models: Iterable[Served], latency: LatencyModel) -> None:
    """Every model must be warm."""
    for served in models:
        if served.manifest.labelled:
            latency.share_rows(served.key, served.model.most_parts)
        if served.bundle.latency is not None:
            latency.learn(served.key, served.bundle.latency)
        timed: dict[int, list[Timed]] = {}
        for one in _timed(served):
            timed.setdefault(one.rows, []).append(one)
        for alike in timed.values():
            _rescale(alike, latency)


def _rescale(timed: Sequence[Timed], latency: LatencyModel) -> None:
    known = {one: latency.call_s(one.series, one.rows, one.length) for one in timed}
    ratios = [one.seconds / before_s for one, before_s in known.items() if before_s]
    for one, before_s in known.items():
        seconds = before_s * median(ratios) if before_s else one.seconds
        latency.rescale(one.series, one.rows, one.length, seconds)


def _timed(served: Served) -> Iterator[Timed]:
    for steps in served.manifest.steps:
        if served.manifest.labelled:
            yield _timed_classifier(served, steps, 1)
            if (most := served.model.most_parts) > 1:
                yield _timed_classifier(served, steps, min(_MOST_ROWS, rows_for(most)))
        elif served.manifest.task == "generate":
            yield from _timed_decoder(served, steps)


def _timed_classifier(served: Served, steps: int, rows: int) -> Timed:
    row = largest_row(served.manifest)
    batch = row[None].repeat(rows, axis=0)
    classifier = served.model.classifier(steps)
    seconds = _least_s(lambda: classifier.run(batch))
    length = row_length(row, served.manifest)
    return Timed(Series(served.key, "classify", steps), length, seconds, rows)


def _timed_decoder(served: Served, steps: int) -> Iterator[Timed]:
    tokens = largest_tokens(served.manifest)[:_PROMPT_TOKENS]
    if len(tokens) < 2:
        return
    decoder = served.model.decoder(steps)
    seconds = _least_s(lambda: decoder.open_batch().add(tokens[:-1]))
    yield Timed(Series(served.key, "prefill", steps), len(tokens) - 1, seconds)
    batch = decoder.open_batch()
    batch.add(tokens[:-1])
    begun_s = time.perf_counter()
    batch.step(tokens[-1:])
    seconds = time.perf_counter() - begun_s
    yield Timed(Series(served.key, "decode", steps), len(tokens), seconds)


def _least_s(call: Callable[[], object]) -> float:
    """The quickest of a few: whatever disturbs a call makes it longer."""
    times = []
    for _ in range(_TIMES):
        begun_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun_s)
    return min(times)
