"""Runs the scheduler's calls on the models, applies the results, and ends jobs.

Used by the engine's thread alone. The engine's lock is held only while the scheduler is touched.
"""

import logging
import math
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from serve.bundle import Manifest, steps_in_words
from serve.engine.cost import CallTimes, CostKey, LatencyModel
from serve.engine.job import (
    Call,
    CallKind,
    ClassifyCall,
    DecodeCall,
    DecodePart,
    Event,
    FailedEvent,
    GeneratedEvent,
    Job,
    LaneKey,
    PrefillCall,
    SearchCall,
    Sharing,
    Span,
    State,
    TokenEvent,
)
from serve.engine.sampling import choose_tokens
from serve.engine.scheduler import Scheduler
from serve.engine.work import (
    Classification,
    Deliveries,
    Generation,
    Translation,
    Work,
    answer_of,
    embedded_rows,
    labelled_rows,
    work_as,
)
from serve.errors import DeadlineLapsed, InternalError, ModelFailure, OutOfMemory, ServeError
from serve.metrics import Metrics
from serve.runtime import (
    Batches,
    DecodeBatch,
    EarlyAnswers,
    Mix,
    Model,
    Outcome,
    Prefill,
    RunningTranslation,
    Segment,
    Speculation,
)
from serve.runtime.protocol import (
    MOST_AHEAD,
    FloatArray,
    IntArray,
    Row,
    RowArray,
    largest_row,
    largest_tokens,
)


class LaneSegment(NamedTuple):
    """A number of steps of the rows of one lane."""

    lane: LaneKey
    steps: int
    tokens: Sequence[int] | None  # the rows' first tokens; None: a token is under way


class Runner:
    """The loaded models, and the runtime's batch, prefills and searches of each lane."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = dict(models)  # by key
        self._batches: dict[LaneKey, DecodeBatch] = {}
        self._prefills: dict[int, Prefill] = {}  # by job number
        self._searches: dict[int, RunningTranslation] = {}  # by job number
        self._speculations: dict[LaneKey, Speculation] = {}

    def add_model(self, key: str, model: Model) -> None:
        """From now on there may be calls of this model."""
        self._models[key] = model

    def has_model(self, key: str) -> bool:
        return key in self._models

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone. It has no rows left."""
        del self._models[model]

    @property
    def cache_bytes(self) -> int:
        """KV cache memory held now."""
        batches = sum(batch.nbytes for batch in self._batches.values())
        prefills = sum(prefill.nbytes for prefill in self._prefills.values())
        return batches + prefills + sum(search.nbytes for search in self._searches.values())

    def held_bytes(self, lane: LaneKey) -> int:
        """KV cache memory that the lane's batch holds now."""
        return self._batches[lane].nbytes if lane in self._batches else 0

    def cache_bytes_for(self, lane: LaneKey, rows: int, positions: int) -> int:
        """The most KV cache memory that a batch of this size may hold."""
        return self._batches_of(lane).bytes_for(positions, rows)

    def classify(self, lane: LaneKey, rows: Sequence[Row]) -> EarlyAnswers:
        """Classify rows: texts of any length, images, or point clouds of one size."""
        return self._answers(lane, _stacked(rows, self._models[lane.model].bundle.manifest))

    def allowed_disagreement(self, lane: LaneKey) -> float:
        """The disagreement that early answers of this lane may have."""
        calibration = self._models[lane.model].bundle.manifest.calibration
        assert calibration is not None
        return min(
            level.max_disagreement
            for level in calibration.levels
            if level.threshold == lane.threshold
        )

    def full_evaluations(self, lane: LaneKey) -> int:
        """Velocity evaluations of a row that takes all steps of the lane."""
        return self._models[lane.model].bundle.manifest.rung(lane.steps).nfe

    def most_lanes(self, lane: LaneKey) -> int:
        """How many rungs of the lane's model may share a call of its one-step graph."""
        mix = self._models[lane.model].mix() if lane.kind == "generate" else None
        return 1 if mix is None else mix.most_batches

    def sides(self, lane: LaneKey) -> int:
        """How many rungs of the lane's model may run in parallel."""
        mix = self._models[lane.model].mix() if lane.kind == "generate" else None
        return 1 if mix is None else mix.sides

    def read(
        self, lane: LaneKey, number: int, tokens: list[int], positions: int
    ) -> FloatArray | None:
        """Prefill the next piece of a job's prompt; it may grow to this many positions.

        After the last piece, logits (V,) for the next token.
        """
        if number not in self._prefills:
            self._prefills[number] = self._batch(lane).read(np.array(tokens, np.int64), positions)
        return self._prefills[number].advance()

    def positions_read(self, number: int) -> int:
        """The positions of a job whose prefill is done."""
        return self._prefills[number].positions

    def join(self, lane: LaneKey, number: int) -> None:
        """A job whose prefill is done becomes the last row of the batch."""
        self._speculations.pop(lane, None)
        self._batch(lane).join(self._prefills[number])
        del self._prefills[number]

    def can_speculate(self, lane: LaneKey) -> bool:
        """Whether a row that is alone in this lane can speculate."""
        mix = self._models[lane.model].mix()
        return mix is not None and mix.can_speculate

    def speculation(self, lane: LaneKey, lead: int) -> Speculation:
        """Speculation of the lane's only row; goes on where it was if the lead is the same."""
        speculation = self._speculations.get(lane)
        if speculation is None or speculation.lead != lead:
            mix = self._models[lane.model].mix()
            assert mix is not None, "a lane whose rows do not run ahead"
            speculation = self._speculations[lane] = mix.speculation(self._batches[lane], lead)
        return speculation

    def begin(self, tokens: Mapping[LaneKey, Sequence[int]]) -> None:
        """Begin a token: each row of these lanes gets its input token."""
        if not tokens:
            return
        for lane in tokens:
            self._speculations.pop(lane, None)
        self._mix(tokens).begin(
            [self._batches[lane] for lane in tokens],
            [np.array(some, np.int64) for some in tokens.values()],
        )

    def advance(self, lanes: Sequence[LaneKey]) -> None:
        """One step of the rows of these lanes, in one call."""
        self._mix(lanes).advance([self._batches[lane] for lane in lanes])

    def parallel(self, sides: Sequence[Sequence[LaneSegment]]) -> dict[LaneKey, Outcome]:
        """The segments of each side one after another, all sides at once."""
        mix = self._mix(segment.lane for side in sides for segment in side)
        found = mix.parallel([[self._segment(segment) for segment in side] for side in sides])
        return {
            segment.lane: outcome
            for side, outcomes in zip(sides, found, strict=True)
            for segment, outcome in zip(side, outcomes, strict=True)
        }

    def end(self, lanes: Sequence[LaneKey]) -> dict[LaneKey, Outcome]:
        """Logits (B, V) of the rows of each of these lanes, after the last step."""
        found = self._mix(lanes).end([self._batches[lane] for lane in lanes]) if lanes else []
        return dict(zip(lanes, found, strict=True))

    def decode(self, lane: LaneKey, tokens: Sequence[int]) -> FloatArray:
        """A whole token: each row gets its input token; logits (B, V) for the next ones."""
        self._speculations.pop(lane, None)
        return self._batches[lane].step(np.array(tokens, np.int64))

    def search(
        self, lane: LaneKey, number: int, source: list[int], prefixes: IntArray
    ) -> FloatArray:
        """Logits (B, V) after each prefix (B, N) of a translation; first reads the source."""
        if number not in self._searches:
            translator = self._models[lane.model].translator(lane.steps)
            self._searches[number] = translator.read(np.array(source, np.int64))
        return self._searches[number].follow(prefixes)

    def forget(self, numbers: Iterable[int]) -> None:
        """Free prefills and searches of jobs that are over; some may never have begun."""
        for number in numbers:
            self._prefills.pop(number, None)
            self._searches.pop(number, None)

    def lengths(self, lane: LaneKey) -> list[int]:
        """Cached positions of each row."""
        return self._batches[lane].lengths if lane in self._batches else []

    def remove(self, lane: LaneKey, rows: Sequence[int]) -> None:
        """Remove rows in this order. A batch without rows frees its memory."""
        if lane not in self._batches:
            return
        if rows:
            self._speculations.pop(lane, None)
        batch = self._batches[lane]
        for row in rows:
            batch.remove(row)
        if not batch.lengths:
            del self._batches[lane]

    def drop_batch(self, lane: LaneKey) -> None:
        """Drop the lane's batch, whatever its state."""
        self._speculations.pop(lane, None)
        self._batches.pop(lane, None)

    def check(self, lane: LaneKey) -> None:
        """Run a small call of the lane to see whether it works."""
        manifest = self._models[lane.model].bundle.manifest
        if lane.kind == "classify":
            self._answers(lane, largest_row(manifest)[None])
            return
        batch = self._batches_of(lane).open_batch()
        batch.add(largest_tokens(manifest)[:1])
        if manifest.text_input.max_tokens > 1:
            batch.step(largest_tokens(manifest)[:1])
        batch.remove(0)

    def opening(self, lane: LaneKey) -> bool:
        """From any thread: whether the running call is opening a graph of the lane's model."""
        model = self._models.get(lane.model)  # the model may be gone after the call
        return model is not None and model.opening

    def interrupt(self, lane: LaneKey) -> None:
        """From any thread: make calls of the lane's model throw as soon as they can."""
        model = self._models.get(lane.model)
        if model is not None:
            model.interrupt()

    def resume(self, lane: LaneKey) -> None:
        """Let calls of the lane's model run again."""
        self._models[lane.model].resume()

    def _answers(self, lane: LaneKey, stacked: RowArray) -> EarlyAnswers:
        model = self._models[lane.model]
        if lane.traced:
            return model.step_classifier(lane.steps).traced(stacked, lane.threshold)
        if lane.threshold is not None:
            return model.step_classifier(lane.steps).early(stacked, lane.threshold)
        classifier = model.classifier(lane.steps)
        run = classifier.embed if lane.embeds else classifier.run
        logits = run(stacked)  # (B, C), or (B, N, C); of embeddings (B, D)
        nfe = model.bundle.manifest.rung(lane.steps).nfe
        return EarlyAnswers(logits, np.full(len(stacked), nfe, dtype=np.int64))

    def _batch(self, lane: LaneKey) -> DecodeBatch:
        if lane not in self._batches:
            self._batches[lane] = self._batches_of(lane).open_batch()
        return self._batches[lane]

    def _segment(self, segment: LaneSegment) -> Segment:
        tokens = None
        if segment.tokens is not None:
            self._speculations.pop(segment.lane, None)
            tokens = np.array(segment.tokens, np.int64)
        return Segment(self._batches[segment.lane], segment.steps, tokens)

    def _mix(self, lanes: Iterable[LaneKey]) -> Mix:
        """The mix of the model that these lanes belong to."""
        mix = self._models[next(iter(lanes)).model].mix()
        assert mix is not None, "lanes that do not go step by step"
        return mix

    def _batches_of(self, lane: LaneKey) -> Batches:
        model = self._models[lane.model]
        if model.bundle.manifest.task == "translate":
            return model.translator(lane.steps)
        return model.decoder(lane.steps)


def _stacked(rows: Sequence[Row], manifest: Manifest) -> RowArray:
    """Rows as one array; texts are padded on the right to the longest."""
    if manifest.tokenizer is None:
        arrays: RowArray = np.stack(rows).astype(np.float32)
        return arrays
    tokens = np.full((len(rows), max(map(len, rows))), manifest.tokenizer.pad_id, np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens


class TokenCounter:
    """Counts the tokens of one call in the metrics, once for all rows that are alike."""

    def __init__(self, metrics: Metrics, now_s: float) -> None:
        self._metrics = metrics
        self._now_s = now_s
        # Rows by lane and time of their last token; None for the first token.
        self._rows: Counter[tuple[LaneKey, float | None]] = Counter()

    def note(self, job: Job[Work], work: Generation) -> None:
        """The job has one more token."""
        self._rows[job.lane, work.last_token_s] += 1
        if work.last_token_s is None:
            self._note_first(job)
        work.last_token_s = self._now_s
        job.tokens_left -= 1

    def count(self) -> None:
        """Update the metrics, once all jobs are noted."""
        for (lane, since_s), rows in self._rows.items():
            self._metrics.tokens.labels(lane.name).inc(rows)
            if since_s is not None:
                between = self._metrics.inter_token_seconds.labels(lane.name, str(lane.steps))
                between.observe_all(self._now_s - since_s, rows)

    def _note_first(self, job: Job[Work]) -> None:
        assert job.started_s is not None
        labels = job.lane.name, str(job.lane.steps)
        job.first_token_s = self._now_s
        self._metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)
        self._metrics.first_token_seconds.labels(*labels).observe(self._now_s - job.queued_s)


OptionT = TypeVar("OptionT")

_FEW = 3  # rounds
_SETTLING = 0.25  # of a trial's work, not counted: switching has a cost of its own
_LOSS = 0.002  # of all time, that trials may cost where patience allows


@dataclass(slots=True)
class Tuner(Generic[OptionT]):
    """Finds the fastest of several options while they are in use.

    Now and then all options are tried one right after the other, since other load on the machine
    changes times more than the options differ. In between, the option that was fastest in most of
    the last rounds is used. While few rounds are known the next comes sooner; the more a round
    costs, the later. Pure: it is told work and times.
    """

    options: tuple[OptionT, ...]
    trial_work: float
    chosen_work: float  # of the best option, between two rounds
    patience: float = 1.0  # most factor on that where other options are far behind
    favour: float = 0.0  # how much faster another option must be than the first
    rounds: int = 5  # the choice is made from this many
    _best: int = 0
    _rounds: deque[Mapping[OptionT, float]] = field(init=False)
    _round: dict[OptionT, float] = field(default_factory=dict)  # seconds per unit of work
    _work: float = 0.0
    _counted: float = 0.0
    _spent_s: float = 0.0
    _until_next: float = 0.0  # work until the next round

    def __post_init__(self) -> None:
        self._rounds = deque(maxlen=self.rounds)

    @property
    def option(self) -> OptionT:
        """The option to use now."""
        return self.best if self._all_tried else self.options[len(self._round)]

    @property
    def best(self) -> OptionT:
        """The fastest option known."""
        return self.options[self._best]

    def observe(self, work: float, seconds: float) -> None:
        """This much work was done with the present option in this time."""
        settled = self._work >= _SETTLING * self.trial_work
        self._work += work
        if self._all_tried:
            if self._work >= self._until_next:
                self._round, self._work = {}, 0.0
        elif settled:
            self._counted += work
            self._spent_s += seconds
            if self._work >= self.trial_work:
                self._end_trial()

    @property
    def _all_tried(self) -> bool:
        return len(self._round) == len(self.options)

    def _end_trial(self) -> None:
        self._round[self.option] = self._spent_s / self._counted
        self._work = self._counted = self._spent_s = 0.0
        if self._all_tried:
            mean_s = sum(self._round.values()) / len(self.options)
            self._rounds.append(
                {option: seconds / mean_s for option, seconds in self._round.items()}
            )
            shares = [median(one[option] for one in self._rounds) for option in self.options]
            least = min(shares)
            self._best = shares.index(least) if least < (1 - self.favour) * shares[0] else 0
            self._until_next = self.chosen_work * len(self._rounds) / _FEW
            if len(self._rounds) >= _FEW:
                lost = self.trial_work * sum(share / least - 1 for share in shares)
                most = self.patience * self._until_next
                self._until_next = max(self._until_next, min(lost / _LOSS, most))


# Positions under way at most; with fewer, a position takes more steps before it drafts.
_POSITIONS = (MOST_AHEAD, MOST_AHEAD // 2)
_TRIAL_TOKENS, _CHOSEN_TOKENS, _TOKENS_PATIENCE, _TOKENS_ROUNDS = 64, 1024, 8, 9
# Speculation must gain this share over plain decoding.
_WORTH_SPECULATING = 0.08
_TRIAL_WORK, _CHOSEN_WORK = 1300, 40_000
_LONG_COUNTS = 1 / 8  # an evaluation of M steps counts M to this power


class Tuners:
    """The tuners of a server: the lead of speculation by lane, and how rungs share the cores."""

    def __init__(self) -> None:
        self._leads: dict[LaneKey, Tuner[int]] = {}
        self._sharing: dict[str, Tuner[Sharing]] = {}  # by model

    def leads(self, lane: LaneKey) -> Tuner[int]:
        """How far a row of this lane runs ahead while it is alone."""
        if lane not in self._leads:
            self._leads[lane] = Tuner(
                leads_of(lane.steps),
                _TRIAL_TOKENS,
                _CHOSEN_TOKENS,
                _TOKENS_PATIENCE,
                _WORTH_SPECULATING,
                _TOKENS_ROUNDS,
            )
        return self._leads[lane]

    def sharing(self, lane: LaneKey, runner: Runner) -> Tuner[Sharing]:
        """How the rungs of this lane's model decode."""
        if lane.model not in self._sharing:
            most_lanes, sides = runner.most_lanes(lane), runner.sides(lane)
            options: tuple[Sharing, ...] = ("alternating",)
            if most_lanes > 1:  # on several cores alternating is never faster than parallel
                options = ("shared", "parallel" if sides > 1 else "alternating")
            self._sharing[lane.model] = Tuner(options, _TRIAL_WORK, _CHOSEN_WORK)
        return self._sharing[lane.model]

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._leads = {lane: one for lane, one in self._leads.items() if lane.model != model}
        self._sharing.pop(model, None)


def leads_of(steps: int) -> tuple[int, ...]:
    """The leads worth a trial, in steps before a draft; 0 is no speculation."""
    return (0, *sorted({-(-steps // most) for most in _POSITIONS})) if steps > 1 else (0,)


def weighted_work(lane: LaneKey, evaluations: int) -> float:
    """What these evaluations count for when ways to share the cores are compared.

    Those of long rungs count more. Otherwise the option that makes most tokens of few steps would
    win, however much tokens of many steps, which take longest anyway, pay for it.
    """
    return evaluations * math.pow(lane.steps, _LONG_COUNTS)


_MOST_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class RecheckCall:
    """Run a row that was answered early again, at all steps."""

    early_lane: LaneKey
    row: Row
    labels: tuple[int, ...]  # the early answer: one label, or one for each position

    @property
    def lane(self) -> LaneKey:
        return self.early_lane._replace(threshold=None, traced=False)


class Rechecks:
    """Runs a random share of early answers again at all steps, to watch how often they differ.

    `max_disagreement` holds for data like the calibration rows; this counts it for real requests.
    Used by the engine's thread alone.
    """

    def __init__(
        self, share: float, allowed_disagreement: Callable[[LaneKey], float], metrics: Metrics
    ) -> None:
        """`promise` gives the disagreement that a lane allows."""
        self._share = share
        self._allowed_disagreement = allowed_disagreement
        self._metrics = metrics
        self._random = random.Random()
        self._waiting: deque[RecheckCall] = deque()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def offer(self, early_lane: LaneKey, row: Row, logits: FloatArray, early: bool) -> None:
        """A row of a lane with a threshold was answered with logits, early or after all steps.

        Logits (C,), or (N, C) for a label at each position; one different label makes a
        disagreement.

        If many rows wait none is taken, which does not depend on their content.
        """
        if len(self._waiting) == _MOST_ROWS or self._random.random() >= self._share:
            return
        if early:
            self._waiting.append(RecheckCall(early_lane, row, answer_of(logits, row)))
        else:
            self._count(early_lane, agrees=True)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._waiting = deque(one for one in self._waiting if one.early_lane.model != model)

    def take(self) -> RecheckCall:
        """The row that has waited longest."""
        return self._waiting.popleft()

    def found(self, call: RecheckCall, logits: FloatArray) -> None:
        """The answer of all steps: logits (C,), or (N, C)."""
        self._count(call.early_lane, agrees=answer_of(logits, call.row) == call.labels)

    def _count(self, early_lane: LaneKey, agrees: bool) -> None:
        labels = early_lane.name, str(self._allowed_disagreement(early_lane))
        self._metrics.rechecked.labels(*labels).inc()
        self._metrics.disagreed.labels(*labels).inc(0 if agrees else 1)


_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CheckCall:
    """Run a small call of a lane where one threw."""

    lane: LaneKey


class FailingModels:
    """The models whose last call threw, until one of their calls succeeds.

    Without requests a check call is due now and then. Written by the engine's thread, read by any.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lanes: dict[str, LaneKey] = {}  # by model, newest last
        self._due_s = 0.0

    @property
    def models(self) -> tuple[str, ...]:
        """Keys of the failing models."""
        return tuple(self._lanes)

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._lanes.pop(model, None)

    def threw(self, lane: LaneKey) -> None:
        """A call of this lane threw."""
        self._lanes.pop(lane.model, None)
        self._lanes[lane.model] = lane
        self._due_s = self._clock() + _AGAIN_S

    def worked(self, lane: LaneKey) -> None:
        """A call of this lane succeeded."""
        if self._lanes:
            self._lanes.pop(lane.model, None)

    def due(self, now_s: float) -> CheckCall | None:
        """The check call to run now, if any."""
        if not self._lanes or now_s < self._due_s:
            return None
        return CheckCall(next(iter(self._lanes.values())))


_log = logging.getLogger("stepdial")


class JobEnder:
    """Ends jobs, each once, with its answer or an error."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        lock: threading.Condition,
        failing: FailingModels,
        metrics: Metrics,
    ) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._failing = failing
        self._metrics = metrics

    def end(self, job: Job[Work], event: Event, deliveries: Deliveries) -> None:
        """End the job with this event, unless it has ended. The caller holds the lock."""
        if self._scheduler.end(job):
            deliveries.append((job.work.deliver, event))

    def end_all(self, error: ServeError) -> Deliveries:
        """End all jobs. The caller holds the lock."""
        deliveries: Deliveries = []
        for job in self._scheduler.jobs():
            self.end(job, FailedEvent(error), deliveries)
        return deliveries

    def lapse(self, jobs: Iterable[Job[Work]]) -> Deliveries:
        """End jobs whose deadline has passed or cannot be met. The caller holds the lock."""
        deliveries: Deliveries = []
        for job in jobs:
            assert job.deadline is not None
            text = job.work.text if isinstance(job.work, Generation) else None
            if self._scheduler.end(job):
                self._metrics.lapsed.labels(job.lane.name).inc()
                error = DeadlineLapsed(job.deadline.given_s, text)
                deliveries.append((job.work.deliver, FailedEvent(error)))
        return deliveries

    def ran(self, lane: LaneKey) -> None:
        """A call of the runtime succeeded."""
        self._failing.worked(lane)

    def fail(self, lane: LaneKey, jobs: Iterable[Job[Work]], error: Exception) -> Deliveries:
        """A call of the runtime threw: end the jobs in it."""
        jobs = list(jobs)
        ids = request_ids(jobs)
        _log.error(
            "%s failed at %d steps%s: %s",
            *(lane.name, lane.steps, in_requests(ids), error),
            exc_info=error,
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        self._metrics.runtime_failures.labels(lane.name).inc()
        self._failing.threw(lane)
        failure = ModelFailure(
            f"{lane.name} failed at {steps_in_words(lane.steps)}: try again, or with other steps"
        )
        deliveries: Deliveries = []
        with self._lock:
            for job in jobs:
                self.end(job, FailedEvent(failure), deliveries)
        return deliveries


def error_for_client(error: Exception, job: Job[Work]) -> ServeError:
    """The error for a client whose own row could not be processed."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory()
    ids = request_ids([job])
    _log.error(
        "a bug of ours%s: %s",
        *(in_requests(ids), error),
        exc_info=error,
        extra={"fields": {"requests": ids}},
    )
    return InternalError("the answer could not be put together: this is our bug, please report it")


def request_ids(jobs: Iterable[Job[Work]]) -> list[str]:
    """The ids of the requests of these jobs, each once."""
    return list(dict.fromkeys(job.request_id for job in jobs if job.request_id))


def in_requests(ids: list[str]) -> str:
    """The ids as part of a log message."""
    return f" in request {', '.join(ids)}" if ids else ""


def span(job: Job[Work], now_s: float) -> Span:
    """When the job waited and ran."""
    assert job.started_s is not None
    return Span(job.queued_s, job.started_s, now_s)


_NO_NUMBERS = "the model's scores for the next token are not finite numbers"


def accept_tokens(jobs: Sequence[Job[Work]], logits: FloatArray) -> list[tuple[Job[Work], Event]]:
    """The next token of each job that has not ended, from logits (B, V), chosen for all at once."""
    finite: list[bool] = np.logical_and.reduce(np.isfinite(logits), axis=1).tolist()  # (B,)
    good: list[int] = []
    works: list[Generation] = []
    events: list[tuple[Job[Work], Event]] = []
    for index, job in enumerate(jobs):
        if job.state is State.ENDED:
            continue
        if finite[index]:
            good.append(index)
            works.append(work_as(Generation, job))
        else:
            events.append((job, FailedEvent(ModelFailure(_NO_NUMBERS))))
    try:
        tokens = choose_tokens(
            [work.sampler for work in works],
            logits if len(good) == len(jobs) else logits[good],
            [work.completion_tokens for work in works],
        )
    except Exception as error:
        return [
            *events,
            *((jobs[index], FailedEvent(error_for_client(error, jobs[index]))) for index in good),
        ]
    for index, work, token in zip(good, works, tokens, strict=True):
        try:
            events.append((jobs[index], work.accept(token, logits[index])))
        except Exception as error:
            events.append((jobs[index], FailedEvent(error_for_client(error, jobs[index]))))
    return events


Part = DecodePart[Work]


class GenerateExecutor:
    """Runs prefill and decode calls, and delivers tokens."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        runner: Runner,
        lock: threading.Condition,
        ender: JobEnder,
        times: CallTimes,
        latency: LatencyModel,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._ender = ender
        self._times = times
        self._latency = latency
        self._metrics = metrics
        self._clock = clock
        self._begun_s: dict[LaneKey, float] = {}  # when the present token was begun
        self._prefill_s: dict[LaneKey, tuple[int, float]] = {}  # (job number, seconds so far)
        self._tuners = Tuners()

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._begun_s = {key: one for key, one in self._begun_s.items() if key.model != model}
        for key in [key for key in self._prefill_s if key.model == model]:
            del self._prefill_s[key]
        self._tuners.drop_model(model)

    def prefill(self, call: PrefillCall[Work]) -> Deliveries:
        """Prefill a piece of a prompt; the last piece gives the first token."""
        self._runner.forget(call.over)
        if call.job is None:
            return []
        lane, job, work = call.lane, call.job, work_as(Generation, call.job)
        begun_s = self._clock()
        try:
            logits = self._runner.read(lane, job.number, work.prompt, job.positions)  # (V,)
        except Exception as error:
            deliveries = self._ender.fail(lane, [job], error)
            self._forget(lane)
            return deliveries
        now_s = self._clock()
        self._times.observe((lane, "prefill"), now_s - begun_s)
        self._ender.ran(lane)
        number, spent_s = self._prefill_s.get(lane, (job.number, 0.0))
        spent_s = now_s - begun_s + (spent_s if number == job.number else 0.0)
        self._prefill_s[lane] = job.number, spent_s
        if logits is None:
            return []
        del self._prefill_s[lane]
        positions = self._runner.positions_read(job.number)
        length = max(positions, len(work.prompt))  # the source of a translation has no positions
        self._latency.observe(CostKey(lane.model, "prefill", lane.steps), 1, length, spent_s)
        self._metrics.call(lane, "prefill", 1, None)
        events = accept_tokens([job], logits[None])
        with self._lock:
            if job.state is not State.ENDED:
                self._scheduler.prefilled(job, full=positions >= work.request.window)
            deliveries = self._take_in(events, now_s)
        self._forget(lane)
        return deliveries

    def decode(self, call: DecodeCall[Work]) -> Deliveries:
        """Run one decode call; lanes whose token ends deliver it."""
        begun_s = self._clock()
        deliveries: Deliveries = []
        parts = [part for part in call.parts if self._prepare(part, deliveries) and part.jobs]
        if not parts:
            return deliveries
        single = len(parts) == 1 and parts[0].whole
        try:
            found = self._run(parts, single, call.parallel)
        except Exception as error:
            found = dict.fromkeys((part.lane for part in parts), error)
        now_s = self._clock()
        errors = {lane: one for lane, one in found.items() if isinstance(one, Exception)}
        parts = [part for part in parts if part.lane not in errors]
        if parts:
            done = self._count(parts, single)
            if call.contended and not errors:
                self._compare(call.lane, done, now_s - begun_s)
            self._ender.ran(parts[0].lane)
        for lane, one in errors.items():
            deliveries += self._fail_batch(lane, one)
        if not parts:
            return deliveries
        longest = max(self._runner.lengths(parts[0].lane)) if single else 0
        for part in parts:
            if part.begins:
                self._begun_s[part.lane] = begun_s
            if part.ends:
                self._times.observe((part.lane, "decode"), now_s - self._begun_s[part.lane])
        deliveries += self._end_token([part for part in parts if part.ends], found, now_s)
        if single:  # in a shared call others would make it seem slower
            # Including what follows the call, since the next call waits for that too.
            lane, jobs, spent_s = parts[0].lane, parts[0].jobs, self._clock() - begun_s
            cost_key = CostKey(lane.model, "decode", lane.steps)
            self._latency.observe(cost_key, len(jobs), longest, spent_s)
            if self._may_speculate(lane, jobs):
                self._tuners.leads(lane).observe(1, spent_s)
        return deliveries

    def _prepare(self, part: Part, deliveries: Deliveries) -> bool:
        """Let rows leave and join; False if the batch was lost."""
        if not (part.evict or part.join or part.lost):
            return True
        lane = part.lane
        try:
            if part.lost:
                self._runner.drop_batch(lane)
            self._runner.remove(lane, part.evict)
            for job in part.join:
                self._runner.join(lane, job.number)
        except Exception as error:
            deliveries += self._fail_batch(lane, error)
            self._runner.forget(job.number for job in part.join)
            return False
        self._update_held_bytes(lane)
        return True

    def _run(self, parts: Sequence[Part], single: bool, parallel: bool) -> dict[LaneKey, Outcome]:
        """Logits (B, V) of lanes whose token ends, or the error of a lane that failed."""
        tokens = {
            part.lane: [work_as(Generation, job).last_token for job in part.jobs]
            for part in parts
            if part.begins
        }
        if single:
            lane = parts[0].lane
            return {lane: self._token(lane, parts[0].jobs, tokens[lane])}
        if parallel:
            sides: defaultdict[int, list[LaneSegment]] = defaultdict(list)
            for part in parts:
                sides[part.side].append(LaneSegment(part.lane, part.calls, tokens.get(part.lane)))
            return self._runner.parallel(list(sides.values()))
        self._runner.begin(tokens)
        self._runner.advance([part.lane for part in parts])
        return self._runner.end([part.lane for part in parts if part.ends])

    def _token(self, lane: LaneKey, jobs: Sequence[Job[Work]], tokens: Sequence[int]) -> FloatArray:
        """Logits (B, V) after these tokens of all rows; a row that is alone may speculate."""
        if not self._may_speculate(lane, jobs):
            return self._runner.decode(lane, tokens)
        lead = self._tuners.leads(lane).option
        if lead:
            return self._speculate(lane, work_as(Generation, jobs[0]), lead)
        return self._runner.decode(lane, tokens)

    def _may_speculate(self, lane: LaneKey, jobs: Sequence[Job[Work]]) -> bool:
        allowed = self._scheduler.limits.speculate and lane.steps > 1 and len(jobs) == 1
        return allowed and self._runner.can_speculate(lane)

    def _speculate(self, lane: LaneKey, work: Generation, lead: int) -> FloatArray:
        """Logits (1, V) after the row's last token, which may be under way already."""
        speculation = self._runner.speculation(lane, lead)
        begun = speculation.tokens[:1]
        drafted_right = begun == [work.last_token]
        if begun:
            self._metrics.accepted.labels(lane.name).inc(drafted_right)
        if not drafted_right:
            speculation.keep(0)
            speculation.begin(work.last_token)
        while True:
            output = speculation.advance()
            if output.drafts is not None:
                self._draft(lane, work, speculation, output.drafts, done=output.last is not None)
            if output.last is not None:
                return output.last[None]

    def _draft(
        self,
        lane: LaneKey,
        work: Generation,
        speculation: Speculation,
        logits: FloatArray,
        done: bool,
    ) -> None:
        """Begin the first position whose draft, from logits (P, V), is new or has changed."""
        begun = speculation.tokens
        for behind, token in enumerate(work.drafts(logits, ahead=done), start=1):
            if begun[behind : behind + 1] != [token]:
                speculation.keep(behind)
                if speculation.room > 0:
                    speculation.begin(token)
                    self._metrics.drafted.labels(lane.name).inc()
                return

    def _end_token(
        self, parts: Sequence[Part], found: Mapping[LaneKey, Outcome], now_s: float
    ) -> Deliveries:
        """Choose a token for each job from logits (B, V), and evict rows that ended."""
        logits = [one for part in parts if isinstance(one := found[part.lane], np.ndarray)]
        if not logits:
            return []
        jobs = [job for part in parts for job in part.jobs]
        events = accept_tokens(jobs, logits[0] if len(logits) == 1 else np.concatenate(logits))
        cached = [length for part in parts for length in self._runner.lengths(part.lane)]
        with self._lock:
            deliveries = self._take_in(events, now_s)
            for job, length in zip(jobs, cached, strict=True):
                if (
                    length >= work_as(Generation, job).request.window
                    and job.state is not State.ENDED
                ):
                    self._scheduler.prefill_again(job)
            evicted = {part.lane: self._scheduler.evict(part.lane) for part in parts}
        for lane, evict in evicted.items():
            if evict:
                self._runner.remove(lane, evict)
                self._update_held_bytes(lane)
        return deliveries

    def _take_in(self, events: Sequence[tuple[Job[Work], Event]], now_s: float) -> Deliveries:
        """Deliver tokens and end jobs. The caller holds the lock."""
        deliveries: Deliveries = []
        counter = TokenCounter(self._metrics, now_s)
        for job, event in events:
            if job.state is State.ENDED:
                continue  # the client disconnected during the call
            if isinstance(event, FailedEvent):
                self._ender.end(job, event, deliveries)
                continue
            work = work_as(Generation, job)
            counter.note(job, work)
            if work.request.stream:
                deliveries.append((work.deliver, event))
            if work.finish_reason is not None:
                self._ender.end(job, work.finished(span(job, now_s)), deliveries)
        counter.count()
        return deliveries

    def _fail_batch(self, lane: LaneKey, error: Exception) -> Deliveries:
        """A call threw: the caches of its batch may be in any state, so all its jobs end."""
        with self._lock:
            jobs = self._scheduler.rows(lane)
        deliveries = self._ender.fail(lane, jobs, error)
        with self._lock:
            self._scheduler.drop_batch(lane)
        self._runner.drop_batch(lane)
        self._update_held_bytes(lane)
        return deliveries

    def _forget(self, lane: LaneKey) -> None:
        """Free the prefill of jobs that have ended."""
        with self._lock:
            over = self._scheduler.prefills_over(lane)
        self._runner.forget(over)

    def _update_held_bytes(self, lane: LaneKey) -> None:
        with self._lock:
            self._scheduler.set_held_bytes(lane, self._runner.held_bytes(lane))

    # Measurements.

    def _compare(self, lane: LaneKey, done: float, seconds: float) -> None:
        """Tell the tuner the time of a call with several lanes, and the scheduler its choice."""
        tuner = self._tuners.sharing(lane, self._runner)
        tuner.observe(done, seconds)
        with self._lock:
            self._scheduler.share(lane.model, tuner.option)

    def _count(self, parts: Sequence[Part], single: bool) -> float:
        """Count the work in the metrics; returns it weighted for the tuner."""
        total = 0.0
        rows = sum(len(part.jobs) for part in parts)
        self._metrics.batch_rows.labels(parts[0].lane.name, "decode").observe(rows)
        for part in parts:
            steps = part.lane.steps if single else part.calls
            self._metrics.stepped(part.lane, "decode", len(part.jobs), steps)
            total += weighted_work(part.lane, len(part.jobs) * steps)
        return total


class Executor:
    """Runs any call of the scheduler to its end."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        runner: Runner,
        lock: threading.Condition,
        times: CallTimes,
        latency: LatencyModel,
        failing: FailingModels,
        rechecks: Rechecks,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._times = times
        self._latency = latency
        self._rechecks = rechecks
        self._metrics = metrics
        self._clock = clock
        self._ender = JobEnder(scheduler, lock, failing, metrics)
        self._generating = GenerateExecutor(
            scheduler, runner, lock, self._ender, times, latency, metrics, clock
        )

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._generating.drop_model(model)

    def execute(self, call: Call[Work] | CheckCall | RecheckCall) -> Deliveries:
        """Run one call. If the runtime throws, only the requests in the call end."""
        match call:
            case ClassifyCall():
                return self._classify(call)
            case SearchCall():
                return self._search(call)
            case PrefillCall():
                return self._generating.prefill(call)
            case DecodeCall():
                return self._generating.decode(call)
            case CheckCall():
                return self._check(call.lane)
            case RecheckCall():
                return self._recheck(call)

    def end_all(self, error: ServeError) -> Deliveries:
        """End all jobs. The caller holds the lock."""
        return self._ender.end_all(error)

    def lapse(self, jobs: Iterable[Job[Work]]) -> Deliveries:
        """End jobs whose deadline has passed or cannot be met. The caller holds the lock."""
        return self._ender.lapse(jobs)

    def _classify(self, call: ClassifyCall[Work]) -> Deliveries:
        begun_s = self._clock()
        rows = [(job, work_as(Classification, job), row) for job, row in call.rows]
        rung = call.rung
        try:
            found = self._runner.classify(rung, [work.rows[row] for _, work, row in rows])
            answers = (
                embedded_rows(found.logits)
                if rung.embeds
                else labelled_rows(found, [work.rows[row] for _, work, row in rows])
            )
        except Exception as error:
            return self._ender.fail(rung, [job for job, _ in call.rows], error)
        self._ender.ran(rung)
        spent: list[int] = found.evaluations.tolist()
        now_s = self._clock()
        self._metrics.call(rung, "classify", len(rows), sum(spent))
        failures: dict[Job[Work], ServeError] = {}
        for (job, work, row), one, count in zip(rows, answers, spent, strict=True):
            if isinstance(one, ModelFailure):
                failures[job] = one
            else:
                work.accept(row, one, call.steps, count)
        if rung.threshold is not None:
            self._offer(rung, [work.rows[row] for _, work, row in rows], found.logits, spent)
        deliveries: Deliveries = []
        with self._lock:
            for job, failure in failures.items():
                self._ender.end(job, FailedEvent(failure), deliveries)
            for job, work, _ in rows:
                if self._scheduler.row_done(job):
                    self._observe_queue(job, rung.steps)
                    deliveries.append((work.deliver, self._classified(job, work, now_s)))
        # Including what follows the call, since the next call waits for that too.
        spent_s = self._clock() - begun_s
        self._times.observe((call.lane, "classify"), spent_s)
        if not rung.traced:  # traced calls read out more often
            cost_key = CostKey(rung.model, "classify", rung.steps, rung.threshold)
            self._latency.observe(cost_key, len(rows), call.length, spent_s)
        return deliveries

    def _classified(self, job: Job[Work], work: Classification, now_s: float) -> Event:
        if job.deadline is not None and now_s > job.deadline.ends_s:
            self._metrics.lapsed.labels(job.lane.name).inc()
            return FailedEvent(DeadlineLapsed(job.deadline.given_s))
        return work.finished(span(job, now_s))

    def _search(self, call: SearchCall[Work]) -> Deliveries:
        """One step of one beam search; frees the memory of those that are over."""
        self._runner.forget(job.number for job in call.over)
        deliveries = [] if call.job is None else self._step(call.lane, call.job)
        with self._lock:
            over = self._scheduler.forget(call.lane)
        self._runner.forget(job.number for job in over)
        return deliveries

    def _step(self, lane: LaneKey, job: Job[Work]) -> Deliveries:
        begun_s = self._clock()
        work = work_as(Translation, job)
        prefixes = work.prefixes  # (B, N)
        try:
            logits = self._runner.search(lane, job.number, work.request.prompt, prefixes)  # (B, V)
        except Exception as error:
            return self._ender.fail(lane, [job], error)
        now_s = self._ran(lane, "search", begun_s, len(prefixes))
        deliveries: Deliveries = []
        try:
            work.accept(logits)
            events: tuple[Event, ...] = work.finished(span(job, now_s)) if work.over else ()
        except Exception as error:
            events = (FailedEvent(error_for_client(error, job)),)
        with self._lock:
            job.tokens_left -= 1
            if events and self._scheduler.end(job):
                self._observe_translation(job, events[-1], now_s)
                deliveries = [
                    (work.deliver, event)
                    for event in events
                    if work.request.stream or not isinstance(event, TokenEvent)
                ]
        # Including what follows the call, since the next call waits for that too.
        self._observe_step(lane, job, prefixes.shape, self._clock() - begun_s)
        return deliveries

    def _check(self, lane: LaneKey) -> Deliveries:
        try:
            self._runner.check(lane)
        except Exception as error:
            return self._ender.fail(lane, [], error)
        self._ender.ran(lane)
        return []

    def _offer(
        self, rung: LaneKey, rows: Sequence[Row], logits: FloatArray, spent: Sequence[int]
    ) -> None:
        """Offer early answers for comparison with those of all steps."""
        full = self._runner.full_evaluations(rung)
        for row, row_logits, count in zip(rows, logits, spent, strict=True):
            self._rechecks.offer(rung, row, row_logits, early=count < full)

    def _recheck(self, call: RecheckCall) -> Deliveries:
        try:
            found = self._runner.classify(call.lane, [call.row])
        except Exception as error:
            return self._ender.fail(call.lane, [], error)
        self._ender.ran(call.lane)
        self._metrics.call(call.lane, "recheck", 1, None)
        self._rechecks.found(call, found.logits[0])
        return []

    # Measurements.

    def _ran(
        self,
        lane: LaneKey,
        kind: CallKind,
        begun_s: float,
        rows: int,
        evaluations: int | None = None,
    ) -> float:
        now_s = self._clock()
        self._times.observe((lane, kind), now_s - begun_s)
        self._metrics.call(lane, kind, rows, evaluations)
        self._ender.ran(lane)
        return now_s

    def _observe_step(
        self, lane: LaneKey, job: Job[Work], shape: tuple[int, ...], seconds: float
    ) -> None:
        rows, length = shape
        kind: CallKind = "search"
        if length == 1:  # the first call also reads the source
            kind, length = "prefill", job.lengths[0]
        self._latency.observe(CostKey(lane.model, kind, lane.steps), rows, length, seconds)

    def _observe_queue(self, job: Job[Work], steps: int) -> None:
        assert job.started_s is not None
        labels = job.lane.name, str(steps)
        self._metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)

    def _observe_translation(self, job: Job[Work], event: Event, now_s: float) -> None:
        self._observe_queue(job, job.lane.steps)
        if isinstance(event, GeneratedEvent):
            labels = job.lane.name, str(job.lane.steps)
            self._metrics.tokens.labels(job.lane.name).inc(event.completion_tokens)
            self._metrics.first_token_seconds.labels(*labels).observe(now_s - job.queued_s)
