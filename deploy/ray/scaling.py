"""How many replicas there should be: from what waits, what is busy, and which deadlines are met.

Each replica reports what its engine counts; Ray Serve keeps the series and applies delays and
limits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric
from ray.serve.config import AutoscalingContext

from serve.engine.engine import Engine

WAITING, BUSY, DEADLINES, MISSED = "waiting", "busy", "deadlines", "missed"


def reported(engine: Engine) -> dict[str, float]:
    """What a replica tells of itself: two gauges, and two counts since it started.

    Requests that are refused because their deadline cannot be met behind the others are missed too.
    """
    families = {family.name: family for family in engine.metrics.registry.collect()}
    refused = _total(families.get("stepdial_rejected"), reason="too_busy")
    return {
        WAITING: float(engine.queued),
        BUSY: float(engine.running + engine.queued > 0),
        DEADLINES: _total(families.get("stepdial_deadlines")) + refused,
        MISSED: _total(families.get("stepdial_lapsed")) + refused,
    }


def _total(family: Metric | None, **labels: str) -> float:
    samples = [] if family is None else family.samples
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


@dataclass(frozen=True, slots=True)
class Load:
    """Of all replicas, over the time that is looked back on."""

    waiting: float  # requests, mean
    busy: float  # replicas, mean
    met: float | None  # share of deadlines; None if there were none


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rule."""

    queue_depth: float
    attainment: float
    busy: float

    def replicas(self, load: Load, running: int, target: int) -> int:
        """How many there should be, given those that run and those that there are to be.

        What waits says how many are missing; a deadline that was missed only that one is, so one
        comes at a time. One goes where the others would not become too busy.
        """
        by_queue = math.ceil(load.waiting / self.queue_depth)
        late = load.met is not None and load.met < self.attainment
        if by_queue > running or late:
            started = running >= target
            return max(by_queue, target + (late and started))
        if running > 1 and not late and load.busy / (running - 1) <= self.busy:
            return min(target, running) - 1
        return target


class QueueAndDeadlines:
    """The policy that Ray Serve asks; `policy_kwargs` are those of `Wanted`."""

    def __init__(self, queue_depth: float, attainment: float, busy: float) -> None:
        self._wanted = Wanted(queue_depth, attainment, busy)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        load = load_of(context.aggregated_metrics or {}, context.raw_metrics or {})
        running, target = context.current_num_replicas, context.target_num_replicas
        if load is None:  # nothing has been told yet
            return target, {}
        return self._wanted.replicas(load, running, target), {}


def load_of(
    means: Mapping[str, Mapping[Any, float]], series: Mapping[str, Mapping[Any, Sequence[Any]]]
) -> Load | None:
    """What the replicas told, added up; None if they have told nothing."""
    if WAITING not in means:
        return None
    given = _grown(series.get(DEADLINES, {}).values())
    missed = _grown(series.get(MISSED, {}).values())
    return Load(
        waiting=sum(means[WAITING].values()),
        busy=sum(means.get(BUSY, {}).values()),
        met=1 - missed / given if given else None,
    )


def _grown(series: Iterable[Sequence[Any]]) -> float:
    """By how much counts have grown from the first of their points to the last."""
    return float(sum(one[-1].value - one[0].value for one in series if one))
