"""A loaded model in the engine: one object holds its runtime, its cost, its lanes and its state.

A swap puts another in its place; forgetting one is dropping it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from serve.bundle import steps_in_words
from serve.catalog import Served
from serve.engine.cost import AnswerTime, Cost
from serve.engine.job import (
    CallKind,
    Deliveries,
    Event,
    FailedEvent,
    Job,
    Jobs,
    Lane,
    LaneKey,
    Limits,
    Turn,
    Unread,
    Waiting,
    in_requests,
    request_ids,
)
from serve.errors import ModelFailure, ModelGone
from serve.metrics import Metrics
from serve.runtime import Batches, Classifier, EarlyAnswers
from serve.runtime.protocol import RowArray, largest_row, largest_tokens

_log = logging.getLogger("stepdial")
_AGAIN_S = 1.0  # between two checks of a model that threw


class Call(NamedTuple):
    """One call of a model that a lane has planned, and what the lane has to know of it."""

    by: "Planner"
    lane: LaneKey
    kind: CallKind | None  # None: no request waits for it
    jobs: Sequence[Job]
    what: Any = None
    seconds: float | None = None  # predicted


class Planner(Protocol):
    """What plans, runs and applies the calls of one model, one at a time."""

    @property
    def model(self) -> "EngineModel": ...

    def plan(self, now_s: float) -> Call | None:
        """The next call; None if nothing can run now. With the engine's lock held."""
        ...

    def run(self, call: Call) -> Any:
        """Run the call; what it returns is for `apply`. Without the lock."""
        ...

    def apply(self, call: Call, result: Any) -> Deliveries:
        """Take in the result, or the exception that `run` threw. With the lock held."""
        ...

    def usual_s(self, call: Call) -> list[float | None]:
        """Recent and predicted times of such calls. From any thread."""
        ...


class CachedLane(Lane, Protocol):
    """A lane whose jobs hold KV cache memory while they run."""

    key: LaneKey
    waiting: Waiting

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        ...

    def sweep(self) -> None:
        """Drop what was held for jobs that have ended. Between two calls, with the lock held."""
        ...

    def occupants(self) -> Sequence[Job]:
        """Jobs that hold memory or have it reserved."""
        ...

    def charged_bytes(self, extra: Job | None = None) -> int:
        """The most memory that they hold or may come to hold, optionally with one more job."""
        ...


@dataclass(slots=True, eq=False)
class Common:
    """The loaded models of an engine, by key, and what they share."""

    limits: Limits
    metrics: Metrics
    clock: Callable[[], float]
    recheck_share: float = 0.0  # of early answers, compared with those of all steps
    models: dict[str, "EngineModel"] = field(default_factory=dict)
    jobs: Jobs = field(default_factory=Jobs)
    unread: Unread = field(default_factory=Unread)
    answer: AnswerTime = field(default_factory=AnswerTime)

    def model(self, key: LaneKey) -> "EngineModel":
        """The model of a lane; ModelGone if it was replaced and is gone."""
        model = self.models.get(key.model)
        if model is None:
            raise ModelGone(f"{key.name} was replaced meanwhile: send the request again")
        return model

    def busy_s(self, but: Turn | None = None) -> float:
        """The usual time of one call of each kind that there is work for."""
        return sum([model.busy_s(but) for model in self.models.values()])

    def lower_caution(self) -> None:
        """Lower caution and speed: a request was refused although nothing runs."""
        self.answer.lower()
        for model in self.models.values():
            model.cost.lower_caution()

    def cached(self) -> list[CachedLane]:
        """All lanes whose jobs hold KV cache memory."""
        return [lane for model in self.models.values() for lane in model.cached]

    @property
    def charged_bytes(self) -> int:
        """KV cache memory that running jobs hold or have reserved."""
        return sum(lane.charged_bytes() for lane in self.cached())

    def may_enter(self, lane: CachedLane) -> bool:
        """Whether there is a slot and memory for the next job of this lane, the oldest first.

        A job does not take memory that an older job of another lane waits for.
        """
        number = lane.waiting[0].number
        free_bytes = self.limits.cache_bytes - self.charged_bytes - _growth_bytes(lane)
        return (
            self._has_room(lane)
            and free_bytes >= 0
            and not any(
                other.waiting
                and other.waiting[0].number < number
                and self._has_room(other)
                and _growth_bytes(other) > free_bytes
                for other in self.cached()
            )
        )

    def rows_in_memory(
        self, model: "EngineModel", key: LaneKey, positions: int, idle: bool = False
    ) -> int:
        """How many rows of a lane run together, if each has this many positions; 1 at least.

        What other lanes hold is taken to stay; on an idle server there is nothing.
        """
        batches, most = model.batches(key.steps), self.limits.decode_rows
        lanes = () if idle else self.cached()
        others = sum(lane.charged_bytes() for lane in lanes if lane.key != key)
        # A prompt is read beside the rows of a batch, and each search has caches of its own.
        each_bytes = batches.bytes_for(positions, 1)
        free_bytes = self.limits.cache_bytes - others
        for rows in range(most, 1, -1):
            needed_bytes = batches.bytes_for(positions, rows) + each_bytes
            if (rows * each_bytes if key.kind == "search" else needed_bytes) <= free_bytes:
                return rows
        return 1

    def _has_room(self, lane: CachedLane) -> bool:
        return len(lane.occupants()) < self.limits.decode_rows


def _growth_bytes(lane: CachedLane) -> int:
    """The memory that the next job of this lane would add."""
    return lane.charged_bytes(lane.waiting[0]) - lane.charged_bytes()


# Load shedding: how many of the full steps requests get while a queue is long.


# The wait at which steps were cut, times this, is the wait at which they rise again, so that they
# do not flap.
_BACK = 0.5


class LoadShedder:
    """Load shedding of one queue: the share of the full steps that requests get.

    The share falls as soon as the wait is too long, and rises only when the wait has halved.
    """

    def __init__(self, begin_s: float | None) -> None:
        self._begin_s = begin_s  # None: steps are never cut
        self._share = 1.0

    def share(self, wait_s: float) -> float:
        """The share for what starts now, given the wait of the whole queue at full steps."""
        self._share = self._next(self._share, wait_s)
        return self._share

    def drain_s(self, wait_s: float, costs: Sequence[float]) -> float:
        """The time to drain the queue if nothing more comes, with the shares it will get."""
        if self._begin_s is None:
            return wait_s
        least, total_s = min(costs), 0.0
        share = self._next(self._share, wait_s)
        while wait_s > 0:
            # The wait at which the share rises next; near the end of the queue it stays as it is.
            below_s = _BACK * self._begin_s / share if share < 1 else 0.0
            below_s = below_s if below_s < wait_s * (1 - 1e-9) else 0.0
            cost = max((one for one in costs if one <= share), default=least)
            total_s += (wait_s - below_s) * cost
            wait_s = below_s
            share = self._next(share, wait_s)
        return total_s

    def _next(self, share: float, wait_s: float) -> float:
        if self._begin_s is None:
            return 1.0
        wanted = min(1.0, self._begin_s / wait_s) if wait_s > 0 else 1.0
        if wanted < share or wait_s <= _BACK * self._begin_s / share:
            return wanted
        return share


class EngineModel:
    """One edition of a model, from when it is served until its last user is gone."""

    def __init__(self, served: Served, cost: Cost, common: Common) -> None:
        self.served = served
        self.key, self.name = served.key, served.name
        self.runtime = served.model
        self.manifest = served.manifest
        self.cost = cost
        self.common = common
        self.lanes: dict[LaneKey, Lane] = {}
        self.cached: list[CachedLane] = []  # those whose jobs hold KV cache memory
        self.shares_calls = False  # whether rungs that generate share calls, or alternate
        self.shedder = LoadShedder(common.limits.degrade_wait_s)  # of generations
        self.threw: LaneKey | None = None  # the lane whose last call did, until one succeeds
        self.check = FailureCheck(self)
        self._classifiers: dict[int, Classifier] = {}  # by steps, as the runtime opened them
        self._batches: dict[int, Batches] = {}
        self._nfe = {rung.steps: rung.nfe for rung in self.manifest.rungs}

    def forget(self) -> None:
        """Drop lanes and runtimes: as cycles, they would stay until the next garbage collection."""
        self.lanes.clear()
        self.cached.clear()
        self._classifiers.clear()
        self._batches.clear()

    def busy(self) -> list[Turn]:
        """The lanes and kinds of calls that there is work for."""
        return [(key, kind) for key, lane in self.lanes.items() for kind in lane.busy()]

    def busy_s(self, but: Turn | None = None) -> float:
        """The usual time of one call of each of them."""
        usual_s = self.cost.usual_s
        return sum([usual_s(turn) or 0.0 for turn in self.busy() if turn != but])

    def classify(self, lane: LaneKey, rows: RowArray) -> EarlyAnswers:
        """The answers to these rows at the steps of a lane."""
        if lane.traced:
            return self.runtime.step_classifier(lane.steps).traced(rows, lane.threshold)
        if lane.threshold is not None:
            return self.runtime.step_classifier(lane.steps).early(rows, lane.threshold)
        classifier = self._classifiers.get(lane.steps)
        if classifier is None:
            classifier = self._classifiers[lane.steps] = self.runtime.classifier(lane.steps)
        run = classifier.embed if lane.embeds else classifier.run
        logits = run(rows)  # (B, C), or (B, N, C); of embeddings (B, D)
        steps = np.full(len(rows), lane.steps, dtype=np.int64)
        return EarlyAnswers(logits, steps, np.full(len(rows), self.nfe(lane.steps), dtype=np.int64))

    def batches(self, steps: int) -> Batches:
        """The rung that generates or translates at these steps."""
        batches = self._batches.get(steps)
        if batches is None:
            runtime, translates = self.runtime, self.manifest.task == "translate"
            batches = runtime.translator(steps) if translates else runtime.decoder(steps)
            self._batches[steps] = batches
        return batches

    def nfe(self, steps: int) -> int:
        """Velocity evaluations of a row that takes these steps."""
        return self._nfe.get(steps, steps)

    def count_call(self, lane: LaneKey, kind: str, rows: int, spent: int | None = None) -> None:
        """Count a call in the metrics; `spent` are its evaluations if it took fewer than all."""
        nfe = self.nfe(lane.steps)
        self.common.metrics.call(lane, kind, rows, rows * nfe if spent is None else spent, nfe)

    # How jobs end.

    def end(self, job: Job, event: Event, deliveries: Deliveries) -> None:
        """End the job with this event, unless it has ended."""
        if self.common.jobs.end(job):
            deliveries.append((job.work.deliver, event))

    def fail(
        self, lane: LaneKey, jobs: Iterable[Job], error: Exception, counted: bool = False
    ) -> Deliveries:
        """A call threw: end the jobs in it. `counted` if it failed in another lane too."""
        jobs = list(jobs)
        ids = request_ids(jobs)
        _log.error(
            "%s failed at %d steps%s: %s",
            *(lane.name, lane.steps, in_requests(ids), error),
            exc_info=error,
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        if not counted:
            self.common.metrics.runtime_failures.labels(lane.name).inc()
        self.threw = lane
        self.check.due_s = self.common.clock() + _AGAIN_S
        failure = ModelFailure(
            f"{lane.name} failed at {steps_in_words(lane.steps)}: try again, or with other steps"
        )
        deliveries: Deliveries = []
        for job in jobs:
            self.end(job, FailedEvent(failure), deliveries)
        return deliveries


def new_cost(served: Served) -> Cost:
    """The cost of a model's calls before anything is known."""
    return Cost(served.model.most_parts if served.manifest.labelled else 1)


class FailureCheck:
    """Runs a small call of the lane that threw now and then, until one succeeds."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.due_s = 0.0

    def plan(self, now_s: float) -> Call | None:
        lane = self.model.threw
        return None if lane is None or now_s < self.due_s else Call(self, lane, None, ())

    def run(self, call: Call) -> None:
        lane, manifest = call.lane, self.model.manifest
        if lane.kind == "classify":
            self.model.classify(lane, largest_row(manifest)[None])
            return
        batch = self.model.batches(lane.steps).open_batch()
        batch.add(largest_tokens(manifest)[:1])
        if manifest.text_input.max_tokens > 1:
            batch.step(largest_tokens(manifest)[:1])
        batch.remove(0)

    def apply(self, call: Call, result: Exception | None) -> Deliveries:
        if result is not None:
            return self.model.fail(call.lane, (), result)
        self.model.threw = None
        return []

    def usual_s(self, call: Call) -> list[float | None]:
        return []
