"""The queues of classifications, and how batches are made from them.

Rows are served in the order of their deadlines. A lane of exact steps runs every row at those. In a
late lane each batch gets the most steps with which it and everything behind it is still in time.
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple

from serve.engine.cost import IDLE_ANSWER_S, ClassifyCosts, LatencyModel
from serve.engine.job import ClassifyCall, Job, LaneKey, Limits, WorkT

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


class Row(NamedTuple, Generic[WorkT]):
    """A row in the queue. Rows sort by their fields, in this order."""

    due_s: float
    number: int  # of the job
    place: int  # index of the row in the job
    job: Job[WorkT]
    tokens: int
    full_s: float  # its share of a call at the lane's steps
    least_s: float  # its share of a call at the fewest steps it may get

    @property
    def ends_s(self) -> float | None:
        """The deadline, if it has one."""
        return None if self.job.deadline is None else self.due_s


class Batch(NamedTuple, Generic[WorkT]):
    """Rows to run in one call, and their steps."""

    steps: int
    rows: tuple[tuple[Job[WorkT], int], ...]
    seconds: float  # predicted


class ClassifyLane(Generic[WorkT]):
    """The queue of one classification lane."""

    def __init__(
        self,
        key: LaneKey,
        costs: ClassifyCosts,
        max_rows: int,
        max_tokens: int,
        shedder: LoadShedder,
    ) -> None:
        self.waiting: list[Row[WorkT]] = []
        self._key = key
        self._costs = costs
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._shedder = shedder
        self._full_s = self._least_s = 0.0  # sums over the queue
        self._given_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._costed: Job[WorkT] | None = None  # the job whose row costs were computed last
        self._row_costs: dict[int, tuple[float, float]] = {}

    def add(self, job: Job[WorkT]) -> None:
        """Queue the rows of a job."""
        self._given_s.append(math.inf if job.deadline is None else job.deadline.given_s)
        for row in self._rows_of(job):
            self._costs.note(row.tokens)
            insort(self.waiting, row)
            self._full_s += row.full_s
            self._least_s += row.least_s
        self._costed = None

    def drop(self, job: Job[WorkT]) -> None:
        """Remove the rows of a job that is over."""
        if job.rows_left:
            self._keep(row for row in self.waiting if row.job is not job)

    def take(self, now_s: float, beside_s: float = 0.0) -> Batch[WorkT]:
        """Take the next batch off the queue: the row due first and rows that fit it."""
        steps = self._steps(now_s, beside_s)
        rows = self._batch(steps, now_s)
        taken = {(row.number, row.place) for row in rows}
        self._keep(row for row in self.waiting if (row.number, row.place) not in taken)
        longest = max(row.tokens for row in rows)
        self._costs.note_call(len(rows), len(rows) * longest / sum(row.tokens for row in rows))
        seconds = self._costs.call_s(steps, len(rows), longest)
        return Batch(steps, tuple((row.job, row.place) for row in rows), seconds)

    def too_late(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs at the head of the queue that cannot be in time even at the fewest steps."""
        found: list[Job[WorkT]] = []
        for row in self.waiting:
            if row.ends_s is None:
                break
            if row.job in found:
                continue
            call_s = self._costs.call_s(self._choices(row.job)[0], 1, row.tokens)
            if now_s + call_s + self._costs.answer_s <= row.ends_s:
                break
            found.append(row.job)
        return found

    @property
    def _least_given_s(self) -> float:
        return min(self._given_s, default=math.inf)

    # Predictions.

    def idle_s(self, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of these rows on an idle server, including the way out."""
        return self._costs.idle_s(steps, lengths) + IDLE_ANSWER_S

    def least_late_s(self, steps: int, due_s: float, start_s: float) -> float:
        """The least lateness of a job due then that queues behind all others."""
        if not self.waiting or self.waiting[-1].due_s > due_s:
            return -math.inf
        done_s = self._least_s * _HEADROOM + self._costs.usual_s(steps) * COST_MARGIN
        return start_s + done_s + self._costs.answer_s - due_s

    def late_s(self, job: Job[WorkT], start_s: float, beside_s: float) -> float:
        """How late a job with a deadline, or a job that it pushes back, would be at worst.

        All run at their fewest steps, from `start_s` on. Not above 0: in time.
        """
        rows = self._rows_of(job)
        due_s = rows[0].due_s
        place = bisect_right(self.waiting, due_s, key=lambda row: row.due_s)
        call_s = self._costs.usual_s(self._choices(job)[0])
        each_s = beside_s / self._max_rows  # other lanes' work, per row
        own_s = sum(row.least_s for row in rows)
        done_s = self._least_s + own_s + each_s * (len(self.waiting) + len(rows))
        late_s = -math.inf
        behind = self.waiting[place:]
        added_s = start_s + beside_s + self._costs.answer_s
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
        idle_s = self._costs.idle_s(self._choices(job)[0], job.lengths)
        done_s = (done_s - own_s) * _HEADROOM + max(own_s, idle_s, call_s) * COST_MARGIN
        return start_s + beside_s + max(late_s, done_s - due_s) + self._costs.answer_s

    def wait_s(self, least: bool) -> float:
        """The time until the queue is empty, at the fewest steps or at the steps it will get.

        The likely time, without the caution of admission.
        """
        ladder = self._choices(self.waiting[0].job)
        if least or len(ladder) == 1:
            return self._least_s / self._costs.caution
        most = ladder[-1]
        usual_s = self._full_s * self._costs.share(most, self._key.steps) / self._costs.caution
        costs = [self._costs.share(steps, most) for steps in ladder]
        return self._shedder.drain_s(usual_s, costs)

    # Batches.

    def _steps(self, now_s: float, beside_s: float) -> int:
        """The most steps for the row due first at which the whole queue stays in time."""
        head = self.waiting[0]
        choices = self._choices(head.job)
        if len(choices) == 1:
            return choices[0]
        full = self._key.steps
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
                fits = now_s + call_s + self._costs.answer_s <= head.ends_s
            if fits and share * pressure <= 1:
                return steps
        return choices[0]

    def _pressure(self, now_s: float, beside_s: float) -> float:
        """The work at full steps, in seconds a second, that the deadlines here need."""
        if self._least_given_s == math.inf:
            return 0.0
        answer_s, each_s = self._costs.answer_s, beside_s / self._max_rows
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

    def _batch(self, steps: int, now_s: float) -> list[Row[WorkT]]:
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
            padding = rows * length - real - row.tokens
            if (
                (row.tokens != head.tokens and not row.job.may_pad)
                or rows * length > self._max_tokens
                or padding > max(_PADDING_TOKENS, _PADDING_SHARE * real)
                or (limit_s is not None and self._costs.call_s(steps, rows, length) > limit_s)
            ):
                if in_order:
                    break
                continue
            chosen.append(row)
            real += row.tokens
            longest = length
        return sorted(chosen)

    def _spare_s(self, steps: int, now_s: float) -> float:
        """The least time left to any row if the queue runs in order."""
        if self._least_given_s == math.inf:
            return math.inf
        share = self._costs.share(steps, self._key.steps)
        done_s, spare_s = now_s + self._costs.answer_s, math.inf
        for row in self.waiting:
            done_s += share * row.full_s
            if row.ends_s is not None:
                spare_s = min(spare_s, row.ends_s - done_s)
        return spare_s

    def _call_limit_s(self, head: Row[WorkT], now_s: float) -> float | None:
        """The longest that a call may take, for its first row and for requests that may arrive."""
        limit_s = _CALL_SHARE * self._least_given_s
        if limit_s == math.inf:
            return None
        if head.ends_s is not None:
            left_s = head.ends_s - self._costs.answer_s - now_s
            limit_s = min(limit_s, _COMPANY_SHARE * left_s)
        return limit_s

    def _rows_of(self, job: Job[WorkT]) -> list[Row[WorkT]]:
        due_s = job.queued_s + _PATIENCE_S if job.deadline is None else job.deadline.ends_s
        least, full = self._choices(job)[0], self._key.steps
        if job is not self._costed:  # usually computed when the job was checked
            self._costed, self._row_costs = job, {}
        costs, row_s = self._row_costs, self._costs.row_s
        for tokens in job.lengths:
            if tokens not in costs:
                costs[tokens] = row_s(full, tokens), row_s(least, tokens)
        return [
            Row(due_s, job.number, place, job, tokens, *costs[tokens])
            for place, tokens in enumerate(job.lengths)
        ]

    def _choices(self, job: Job[WorkT]) -> tuple[int, ...]:
        return job.choices if self._key.late else (self._key.steps,)

    def _keep(self, rows: Iterable[Row[WorkT]]) -> None:
        self.waiting = list(rows)
        self._full_s = sum(row.full_s for row in self.waiting)
        self._least_s = sum(row.least_s for row in self.waiting)


class ClassifyLanes(Generic[WorkT]):
    """All classification lanes, opened when first needed."""

    def __init__(self, limits: Limits, latency: LatencyModel) -> None:
        self._limits = limits
        self._latency = latency
        self._lanes: dict[LaneKey, ClassifyLane[WorkT]] = {}

    def open(self, key: LaneKey) -> bool:
        """Open this lane; True if it is new."""
        if key in self._lanes:
            return False
        costs = ClassifyCosts(self._latency, key, self._limits.batch_rows)
        shedder = LoadShedder(self._limits.degrade_wait_s)
        self._lanes[key] = ClassifyLane(
            key, costs, self._limits.batch_rows, self._limits.batch_tokens, shedder
        )
        return True

    def close(self, model: str) -> None:
        """Close the lanes of a model. Their queues are empty."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if key.model != model}

    def add(self, job: Job[WorkT]) -> None:
        self._lanes[job.lane].add(job)

    def drop(self, job: Job[WorkT]) -> None:
        self._lanes[job.lane].drop(job)

    def take(self, key: LaneKey, now_s: float, beside_s: float) -> ClassifyCall[WorkT] | None:
        """The lane's next call, if rows wait and have waited long enough for others to join."""
        lane = self._lanes[key]
        if not lane.waiting or self._wake_s(lane) > now_s:
            return None
        batch = lane.take(now_s, beside_s)
        return ClassifyCall(key, batch.rows, batch.steps, batch.seconds)

    def wake_s(self) -> float | None:
        """When the first batch will have waited long enough."""
        waiting = [lane for lane in self._lanes.values() if lane.waiting]
        return min(map(self._wake_s, waiting), default=None)

    def busy(self) -> list[LaneKey]:
        """Lanes with rows in the queue."""
        return [key for key, lane in self._lanes.items() if lane.waiting]

    def too_late(self, now_s: float) -> list[Job[WorkT]]:
        """Jobs whose deadline can no longer be met."""
        return [job for lane in self._lanes.values() for job in lane.too_late(now_s)]

    def calls_ahead(self, key: LaneKey) -> int:
        """How many calls of its lane a new row would wait for."""
        lane = self._lanes.get(key)
        return len(lane.waiting) // self._limits.batch_rows if lane else 0

    def idle_s(self, key: LaneKey, steps: int, lengths: tuple[int, ...]) -> float:
        """The time of these rows on an idle server, including the way out."""
        return self._lanes[key].idle_s(steps, lengths)

    def least_late_s(self, key: LaneKey, steps: int, due_s: float, start_s: float) -> float:
        """The least lateness of a job due then that queues behind all others."""
        lane = self._lanes.get(key)
        return -math.inf if lane is None else lane.least_late_s(steps, due_s, start_s)

    def late_s(self, job: Job[WorkT], start_s: float, beside_s: float) -> float:
        """How late a job with a deadline, or a job that it pushes back, would be at worst."""
        return self._lanes[job.lane].late_s(job, start_s, beside_s)

    def wait_s(self, least: bool) -> float:
        """The time until all queues are empty, at the fewest steps or at the likely ones."""
        return sum(
            lane.wait_s(least) * self._latency.lasting(key.model)
            for key, lane in self._lanes.items()
            if lane.waiting
        )

    def _wake_s(self, lane: ClassifyLane[WorkT]) -> float:
        """When the lane's next batch will have waited long enough for others to join."""
        job = lane.waiting[0].job
        enough = len(lane.waiting) >= self._limits.batch_rows or job.deadline is not None
        return job.queued_s if enough else job.queued_s + self._limits.max_wait_s
