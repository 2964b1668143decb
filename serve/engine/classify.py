"""Classification: the queue of a lane, how batches are made from it, and what their calls give.

Rows are served in the order of their deadlines. A lane of exact steps runs every row at those. In a
late lane each batch gets the most steps with which it and everything behind it is still in time.
"""

import math
import random
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from serve.bundle import Manifest
from serve.engine.cost import IDLE_ANSWER_S, ClassifyCosts, CostKey
from serve.engine.job import (
    CallKind,
    ClassifiedEvent,
    Deliver,
    Deliveries,
    Event,
    FailedEvent,
    Job,
    Labelled,
    LaneKey,
    Scores,
    Span,
    Spent,
    State,
    Tags,
    Work,
)
from serve.engine.loaded import Call, EngineModel, LoadShedder
from serve.engine.writing import ScoreArray
from serve.errors import DeadlineLapsed, ModelFailure, ServeError
from serve.runtime import EarlyAnswers
from serve.runtime.protocol import FloatArray, Row, RowArray


def softmax(logits: FloatArray) -> ScoreArray:
    """Probabilities (..., C) of logits (..., C), in float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


_NO_NUMBERS = "the model's scores for this input are not finite numbers"


def labelled_rows(found: EarlyAnswers, rows: Sequence[Row]) -> list[Labelled | ModelFailure]:
    """The labels of each row, or an error if its logits are not finite."""
    logits = found.logits
    if found.readouts is None and logits.ndim == 2:
        with np.errstate(invalid="ignore"):
            return _if_finite(logits, softmax(logits))
    answered: list[Labelled | ModelFailure] = []
    for place, row in enumerate(rows):
        read = _read(logits[place], len(row))
        readouts: Iterable[FloatArray] = () if found.readouts is None else found.readouts[:, place]
        steps = [_read(one, len(row)) for one in readouts]
        if read is None or None in steps:
            answered.append(ModelFailure(_NO_NUMBERS))
        else:
            answered.append(Labelled(read, tuple(one for one in steps if one is not None)))
    return answered


def _if_finite(
    found: FloatArray, answers: FloatArray | ScoreArray
) -> list[Labelled | ModelFailure]:
    """The answer (B, C) to each row, or an error where what was found (B, C) is not finite."""
    finite = np.logical_and.reduce(np.isfinite(found), axis=1)  # (B,)
    return [
        Labelled(tuple(row)) if good else ModelFailure(_NO_NUMBERS)
        for row, good in zip(answers.tolist(), finite.tolist(), strict=True)
    ]


def answer_of(logits: FloatArray, row: Row) -> tuple[int, ...]:
    """The likeliest label of a row's logits (C,), or of each position of (N, C)."""
    if logits.ndim == 1:
        return (int(logits.argmax()),)
    return tuple(logits[: len(row)].argmax(axis=-1).tolist())


def _read(logits: FloatArray, positions: int) -> Scores | Tags | None:
    """The scores in logits (C,), or in the first `positions` of (N, C); None if not finite."""
    kept = logits if logits.ndim == 1 else logits[:positions]
    if not np.isfinite(kept).all():
        return None
    scores = softmax(kept)
    if logits.ndim == 1:
        return tuple(scores.tolist())
    return Tags(tuple(kept.argmax(axis=-1).tolist()), tuple(scores.max(axis=-1).tolist()))


class Classification(Work):
    """Rows to classify, for one client."""

    def __init__(self, rows: Sequence[Row], deliver: Deliver) -> None:
        self.rows = rows
        self.deliver = deliver
        self._labelled: list[Labelled | None] = [None] * len(rows)
        self._steps = [0] * len(rows)
        self._spent = [Spent(0, 0)] * len(rows)

    def accept(self, row: int, labelled: Labelled, steps: int, spent: Spent) -> None:
        """Take a row's answer, its rung and its cost."""
        self._labelled[row] = labelled
        self._steps[row] = steps
        self._spent[row] = spent

    def finished(self, span: Span) -> ClassifiedEvent:
        """The answer, once every row has its own."""
        rows = tuple(one for one in self._labelled if one is not None)
        assert len(rows) == len(self._labelled), "a row without an answer"
        return ClassifiedEvent(rows, tuple(self._steps), tuple(self._spent), span)


def classification_of(job: Job) -> Classification:
    """The work of a job in a lane that classifies."""
    assert isinstance(job.work, Classification)
    return job.work


# Rows of other lengths join a batch while padding stays below this share of the real tokens, or
# below this number of tokens, where a call of their own would cost more than the padding.
_PADDING_SHARE = 0.25
_PADDING_TOKENS = 64
# How many full batches ahead to look for rows of similar length.
_WINDOW_BATCHES = 4
# A row without a deadline is due after this time, so that it cannot starve.
_PATIENCE_S = 1.0
# Rows behind the next batch may plan with this share of their time only, since more will come.
_TARGET_SHARE = 0.6
# A call takes at most this share of the shortest time that recent requests gave: requests may
# arrive during the call.
_CALL_SHARE = 0.25
# And at most this share of the time left to its first row, if other rows join.
_COMPANY_SHARE = 0.8
# Batches come out less full than planned: a request is admitted if this much more work would fit,
COST_MARGIN = 1.05
# and this much more work before it, since the machine may slow down and late rows cost more.
_HEADROOM = 1.5
_REMEMBERED = 64  # recent deadlines


class QueuedRow(NamedTuple):
    """A row in the queue. Rows sort by their fields, in this order."""

    due_s: float
    number: int  # of the job
    place: int  # index of the row in the job
    job: Job
    tokens: int
    full_s: float  # its share of a call at the lane's steps
    least_s: float  # its share of a call at the fewest steps it may get

    @property
    def ends_s(self) -> float | None:
        """The deadline, if it has one."""
        return None if self.job.deadline is None else self.due_s


def due_s_of(job: Job) -> float:
    """When a job is due: at its deadline, or before it would starve."""
    return job.queued_s + _PATIENCE_S if job.deadline is None else job.deadline.ends_s


class Batch(NamedTuple):
    """Rows to run in one call, and their steps."""

    steps: int
    rows: tuple[tuple[Job, int], ...]
    seconds: float  # predicted


class ClassifyLane:
    """One classification lane: its rows in the order of their deadlines."""

    def __init__(self, key: LaneKey, model: EngineModel) -> None:
        limits, self._answer_time = model.common.limits, model.common.answer
        self.key = key
        self.model = model
        self.waiting: list[QueuedRow] = []
        self.rechecks = Rechecks(model, model.common.recheck_share)
        self._costs = ClassifyCosts(model.cost, key, limits.batch_rows)
        self._max_rows, self._max_tokens = limits.batch_rows, limits.batch_tokens
        self._max_wait_s = limits.max_wait_s
        self._shedder = LoadShedder(limits.degrade_wait_s)
        self._full_s = self._least_s = 0.0  # sums over the queue
        self._given_s: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, job: Job) -> None:
        """Queue the rows of a job."""
        self._given_s.append(math.inf if job.deadline is None else job.deadline.given_s)
        for row in self._rows_of(job):
            self._costs.note(row.tokens)
            insort(self.waiting, row)
            self._full_s += row.full_s
            self._least_s += row.least_s

    def drop(self, job: Job) -> None:
        """Remove the rows of a job that is over."""
        if job.rows_left:
            self._keep(row for row in self.waiting if row.job is not job)

    def busy(self) -> Sequence[CallKind]:
        return ("classify",) if self.waiting else ()

    @property
    def calls_ahead(self) -> int:
        """How many calls a new row would wait for."""
        return len(self.waiting) // self._max_rows

    @property
    def wake_s(self) -> float | None:
        """When the next batch will have waited long enough for others to join."""
        if not self.waiting:
            return None
        job = self.waiting[0].job
        enough = len(self.waiting) >= self._max_rows or job.deadline is not None
        return job.queued_s if enough else job.queued_s + self._max_wait_s

    # A call.

    def plan(self, now_s: float) -> Call | None:
        if self.wake_s is None or self.wake_s > now_s:
            return None
        batch = self.take(now_s, self.model.common.busy_s((self.key, "classify")))
        for job, _ in batch.rows:
            self.model.common.jobs.start(job, now_s)
        jobs = [job for job, _ in batch.rows]
        return Call(self, self.key, "classify", jobs, batch, batch.seconds)

    def run(self, call: Call) -> "Classified":
        begun_s = self.model.common.clock()
        batch: Batch = call.what
        rows = [classification_of(job).rows[place] for job, place in batch.rows]
        rung = self.key._replace(steps=batch.steps, late=False)
        found = self.model.classify(rung, stack_rows(rows, self.model.manifest))
        logits = found.logits  # of embeddings the states (B, D)
        answers = _if_finite(logits, logits) if rung.embeds else labelled_rows(found, rows)
        return Classified(begun_s, self.model.common.clock(), rung, found, answers)

    def apply(self, call: Call, result: "Classified | Exception") -> Deliveries:
        batch: Batch = call.what
        if isinstance(result, Exception):
            rung = self.key._replace(steps=batch.steps, late=False)
            return self.model.fail(rung, call.jobs, result)
        begun_s, ran_s, rung, found, answers = result
        model, common = self.model, self.model.common
        model.threw = None
        spent = [
            Spent(*one)
            for one in zip(found.steps.tolist(), found.evaluations.tolist(), strict=True)
        ]
        model.count_call(rung, "classify", len(answers), sum(one.evaluations for one in spent))
        deliveries: Deliveries = []
        failures: dict[Job, ServeError] = {}
        for (job, place), one, cost in zip(batch.rows, answers, spent, strict=True):
            if isinstance(one, ModelFailure):
                failures[job] = one
            else:
                classification_of(job).accept(place, one, batch.steps, cost)
        for job, failure in failures.items():
            model.end(job, FailedEvent(failure), deliveries)
        for job, _ in batch.rows:
            if job.state is State.ENDED:
                continue
            job.rows_left -= 1
            if job.rows_left == 0:
                self._observe_queue(job, batch.steps)
                model.end(job, self._answer(job, ran_s), deliveries)
        if rung.threshold is not None:
            for (job, place), logits, cost in zip(batch.rows, found.logits, spent, strict=True):
                row = classification_of(job).rows[place]
                self.rechecks.offer(rung, row, logits, early=cost.steps < rung.steps)
        # Including what follows the call, since the next call waits for that too.
        spent_s = common.clock() - begun_s
        model.cost.observe_usual((self.key, "classify"), spent_s)
        if not rung.traced:  # traced calls read out more often
            cost_key = CostKey("classify", rung.steps, rung.threshold)
            length = max(job.lengths[place] for job, place in batch.rows)
            model.cost.observe(cost_key, len(batch.rows), length, spent_s)
        return deliveries

    def usual_s(self, call: Call) -> list[float | None]:
        return [call.seconds, self.model.cost.usual_s((self.key, "classify"))]

    def _answer(self, job: Job, now_s: float) -> Event:
        if job.deadline is not None and now_s > job.deadline.ends_s:
            self.model.common.metrics.lapsed.labels(job.lane.name).inc()
            return FailedEvent(DeadlineLapsed(job.deadline.given_s))
        return classification_of(job).finished(job.span(now_s))

    def _observe_queue(self, job: Job, steps: int) -> None:
        assert job.started_s is not None
        seconds = self.model.common.metrics.queue_seconds.labels(job.lane.name, str(steps))
        seconds.observe(job.started_s - job.queued_s)

    def take(self, now_s: float, beside_s: float = 0.0) -> Batch:
        """Take the next batch off the queue: the row due first and rows that fit it."""
        steps = self._steps(now_s, beside_s)
        rows = self._batch(steps, now_s)
        taken = {(row.number, row.place) for row in rows}
        self._keep(row for row in self.waiting if (row.number, row.place) not in taken)
        longest = max(row.tokens for row in rows)
        self._costs.note_call(len(rows), len(rows) * longest / sum(row.tokens for row in rows))
        seconds = self._costs.call_s(steps, len(rows), longest)
        return Batch(steps, tuple((row.job, row.place) for row in rows), seconds)

    def too_late(self, now_s: float) -> list[Job]:
        """Jobs at the head of the queue that cannot be in time even at the fewest steps."""
        found: list[Job] = []
        for row in self.waiting:
            if row.ends_s is None:
                break
            if row.job in found:
                continue
            call_s = self._costs.call_s(self._choices(row.job)[0], 1, row.tokens)
            if now_s + call_s + self._answer_time.seconds <= row.ends_s:
                break
            found.append(row.job)
        return found

    @property
    def _least_given_s(self) -> float:
        return min(self._given_s, default=math.inf)

    # Predictions.

    def idle_s(self, steps: int, lengths: tuple[int, ...]) -> float:
        """The least deadline for these rows that an idle server accepts."""
        return self._alone_s(steps, lengths) * COST_MARGIN + IDLE_ANSWER_S

    def least_late_s(self, steps: int, due_s: float, start_s: float) -> float:
        """The least lateness of a job due then that queues behind all others."""
        if not self.waiting or self.waiting[-1].due_s > due_s:
            return -math.inf
        done_s = self._least_s * _HEADROOM + self._costs.usual_s(steps) * COST_MARGIN
        return start_s + done_s + self._answer_time.seconds - due_s

    def late_s(self, job: Job, start_s: float, beside_s: float) -> float:
        """How late a job with a deadline, or a job that it pushes back, would be at worst.

        All run at their fewest steps, from `start_s` on. Not above 0: in time.
        """
        due_s, least, lengths = due_s_of(job), self._choices(job)[0], job.lengths
        place = bisect_right(self.waiting, due_s, key=lambda row: row.due_s)
        call_s = self._costs.usual_s(least)
        each_s = beside_s / self._max_rows  # other lanes' work, per row
        own_s = self._costs.rows_s(least, lengths)
        done_s = self._least_s + own_s + each_s * (len(self.waiting) + len(lengths))
        late_s = -math.inf
        behind = self.waiting[place:]
        added_s = start_s + beside_s + self._answer_time.seconds
        if not behind or (done_s + call_s) * _HEADROOM + added_s <= behind[0].due_s:
            # Everything behind is done in time anyway.
            done_s -= sum(row.least_s for row in behind) + each_s * len(behind)
            behind = []
        # Hundreds of rows: tuples, not attributes.
        for row_due_s, _, _, other, _, _, least_s in reversed(behind):
            if other.deadline is not None:
                row_done_s = done_s + call_s - least_s if call_s > least_s else done_s
                if row_done_s * _HEADROOM - row_due_s > late_s:
                    late_s = row_done_s * _HEADROOM - row_due_s
            done_s -= least_s + each_s
        # If nothing waits, its rows begin calls of their own.
        shared_s = max(own_s, call_s) if self.waiting else 0.0
        last_s = max(self._alone_s(least, lengths), shared_s)
        done_s = (done_s - own_s) * _HEADROOM + last_s * COST_MARGIN
        return start_s + beside_s + max(late_s, done_s - due_s) + self._answer_time.seconds

    def _alone_s(self, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of the calls of these rows if there are no others."""
        total_s, rows, real, longest = 0.0, 0, 0, 0
        for tokens in sorted(lengths, reverse=True):
            if rows and (rows == self._max_rows or self._too_large(rows, real, longest, tokens)):
                total_s += self._costs.call_s(steps, rows, longest)
                rows = real = 0
            if not rows:
                longest = tokens
            rows, real = rows + 1, real + tokens
        return total_s + self._costs.call_s(steps, rows, longest)

    def wait_s(self, least: bool) -> float:
        """The time until the queue is empty, at the fewest steps or at the steps it will get.

        The likely time, without the caution of admission.
        """
        ladder = self._choices(self.waiting[0].job)
        if least or len(ladder) == 1:
            return self._least_s / self._costs.caution
        most = ladder[-1]
        usual_s = self._full_s * self._costs.share(most, self.key.steps) / self._costs.caution
        costs = [self._costs.share(steps, most) for steps in ladder]
        return self._shedder.drain_s(usual_s, costs)

    # Batches.

    def _steps(self, now_s: float, beside_s: float) -> int:
        """The most steps for the row due first at which the whole queue stays in time."""
        head = self.waiting[0]
        choices = self._choices(head.job)
        if len(choices) == 1:
            return choices[0]
        full = self.key.steps
        most = self._costs.share(choices[-1], full)
        rounds_s = beside_s * -(-len(self.waiting) // self._max_rows)
        others_s = sum(row.full_s for row in self.waiting if row.job is not head.job)
        allowed = most * self._shedder.share(others_s * most + (rounds_s if others_s else 0.0))
        pressure = self._pressure(now_s, beside_s)
        for steps in reversed(choices):
            share = self._costs.share(steps, full)
            if head.ends_s is None:
                fits = share <= allowed
            else:
                call_s = self._costs.call_s(steps, 1, head.tokens)
                fits = now_s + call_s + self._answer_time.seconds <= head.ends_s
            if fits and share * pressure <= 1:
                return steps
        return choices[0]

    def _pressure(self, now_s: float, beside_s: float) -> float:
        """The work at full steps, in seconds a second, that the deadlines here need."""
        if self._least_given_s == math.inf:
            return 0.0
        answer_s, each_s = self._answer_time.seconds, beside_s / self._max_rows
        done_s = pressure = 0.0
        for position, row in enumerate(self.waiting):
            done_s += row.full_s
            if row.ends_s is None:
                continue
            left_s = row.ends_s - answer_s - now_s - position * each_s
            if position:
                left_s *= _TARGET_SHARE if position >= self._max_rows else _COMPANY_SHARE
            if done_s > pressure * left_s:
                pressure = done_s / max(left_s, 1e-6)
        return pressure

    def _batch(self, steps: int, now_s: float) -> list[QueuedRow]:
        """The row due first, and rows of similar length. The first always runs, so none starves."""
        window = [
            row
            for row in self.waiting[: self._max_rows * _WINDOW_BATCHES]
            if self._choices(row.job)[0] <= steps <= self._choices(row.job)[-1]
        ]
        head = self.waiting[0]
        chosen = [head]
        real = longest = head.tokens
        limit_s = self._call_limit_s(head, now_s)
        others = window[1:]
        enough = self._costs.enough_rows(steps, head.tokens)
        in_order = self._spare_s(steps, now_s) < self._costs.usual_s(steps)
        if not in_order:
            others.sort(key=lambda row: abs(row.tokens - head.tokens))
        for row in others:
            if len(chosen) >= enough:
                break
            rows, length = len(chosen) + 1, max(longest, row.tokens)
            if (
                (row.tokens != head.tokens and not row.job.may_pad)
                or self._too_large(len(chosen), real, length, row.tokens)
                or (limit_s is not None and self._costs.call_s(steps, rows, length) > limit_s)
            ):
                if in_order:
                    break
                continue
            chosen.append(row)
            real += row.tokens
            longest = length
        return sorted(chosen)

    def _too_large(self, rows: int, real: int, length: int, tokens: int) -> bool:
        """Whether these rows, of `real` tokens, and one more have too many at this length."""
        whole = (rows + 1) * length
        allowed = max(_PADDING_TOKENS, _PADDING_SHARE * real)
        return whole > self._max_tokens or whole - real - tokens > allowed

    def _spare_s(self, steps: int, now_s: float) -> float:
        """The least time left to any row if the queue runs in order."""
        if self._least_given_s == math.inf:
            return math.inf
        share = self._costs.share(steps, self.key.steps)
        done_s, spare_s = now_s + self._answer_time.seconds, math.inf
        for row in self.waiting:
            done_s += share * row.full_s
            if row.ends_s is not None:
                spare_s = min(spare_s, row.ends_s - done_s)
        return spare_s

    def _call_limit_s(self, head: QueuedRow, now_s: float) -> float | None:
        """The longest that a call may take, for its first row and for requests that may arrive."""
        limit_s = _CALL_SHARE * self._least_given_s
        if limit_s == math.inf:
            return None
        if head.ends_s is not None:
            left_s = head.ends_s - self._answer_time.seconds - now_s
            limit_s = min(limit_s, _COMPANY_SHARE * left_s)
        return limit_s

    def _rows_of(self, job: Job) -> list[QueuedRow]:
        due_s, least, full = due_s_of(job), self._choices(job)[0], self.key.steps
        row_s = self._costs.row_s
        costs = {tokens: (row_s(full, tokens), row_s(least, tokens)) for tokens in {*job.lengths}}
        return [
            QueuedRow(due_s, job.number, place, job, tokens, *costs[tokens])
            for place, tokens in enumerate(job.lengths)
        ]

    def _choices(self, job: Job) -> tuple[int, ...]:
        return job.choices if self.key.late else (self.key.steps,)

    def _keep(self, rows: Iterable[QueuedRow]) -> None:
        self.waiting = list(rows)
        self._full_s = sum(row.full_s for row in self.waiting)
        self._least_s = sum(row.least_s for row in self.waiting)


class Classified(NamedTuple):
    """What one call has given."""

    begun_s: float
    ran_s: float
    rung: LaneKey  # that the rows ran on
    found: EarlyAnswers
    answers: list[Labelled | ModelFailure]


_MOST_ROWS = 64


class Recheck(NamedTuple):
    """A row that was answered early."""

    early_lane: LaneKey
    row: Row
    labels: tuple[int, ...]  # the early answer: one label, or one for each position


class Rechecks:
    """Runs a random share of early answers again at all steps, to watch how often they differ.

    `max_disagreement` holds for data like the calibration rows; this counts it for real requests.
    """

    def __init__(self, model: EngineModel, share: float) -> None:
        self.model = model
        self.waiting: deque[Recheck] = deque()
        self._share = share
        self._random = random.Random()

    def offer(self, early_lane: LaneKey, row: Row, logits: FloatArray, early: bool) -> None:
        """A row of a lane with a threshold was answered with logits, early or after all steps.

        Logits (C,), or (N, C) for a label at each position; one different label makes a
        disagreement.

        If many rows wait none is taken, which does not depend on their content.
        """
        if len(self.waiting) == _MOST_ROWS or self._random.random() >= self._share:
            return
        if early:
            self.waiting.append(Recheck(early_lane, row, answer_of(logits, row)))
        else:
            self._count(early_lane, agrees=True)

    def plan(self, now_s: float) -> Call | None:
        if not self.waiting:
            return None
        one = self.waiting.popleft()
        lane = one.early_lane._replace(threshold=None, traced=False)
        return Call(self, lane, None, (), one)

    def run(self, call: Call) -> FloatArray:
        one: Recheck = call.what
        rows = stack_rows([one.row], self.model.manifest)
        return self.model.classify(call.lane, rows).logits

    def apply(self, call: Call, result: FloatArray | Exception) -> Deliveries:
        if isinstance(result, Exception):
            return self.model.fail(call.lane, (), result)
        self.model.threw = None
        self.model.count_call(call.lane, "recheck", 1)
        one: Recheck = call.what
        self._count(one.early_lane, agrees=answer_of(result[0], one.row) == one.labels)
        return []

    def usual_s(self, call: Call) -> list[float | None]:
        return []

    def _count(self, early_lane: LaneKey, agrees: bool) -> None:
        calibration = self.model.manifest.calibration
        assert calibration is not None
        allowed = min(
            level.max_disagreement
            for level in calibration.levels
            if level.threshold == early_lane.threshold
        )
        metrics, labels = self.model.common.metrics, (early_lane.name, str(allowed))
        metrics.rechecked.labels(*labels).inc()
        metrics.disagreed.labels(*labels).inc(0 if agrees else 1)


def stack_rows(rows: Sequence[Row], manifest: Manifest) -> RowArray:
    """Rows as one array: texts padded on the right to the longest, or arrays of one size."""
    if manifest.tokenizer is None:
        arrays: RowArray = np.stack(rows).astype(np.float32)
        return arrays
    tokens = np.full((len(rows), max(map(len, rows))), manifest.tokenizer.pad_id, np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens
