"""Admission control: which requests may queue, at how many steps, and when to retry."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from serve.bundle import steps_in_words
from serve.engine.backlog import GenerationSize, ModelBacklog
from serve.engine.classify import LoadShedder
from serve.engine.cost import LatencyModel
from serve.engine.job import Deadline, Job, LaneKey, Limits
from serve.engine.scheduler import Scheduler
from serve.engine.work import Work
from serve.errors import DeadlineLapsed, ImpossibleDeadline, QueueFull, TooBusy, Unprocessable


class RetryAfter:
    """Spreads the clients that were refused over time, so that they do not all come back at once.

    Each gets a turn behind those that were refused before it. Turns in the past are forgotten.
    """

    def __init__(self, most_jobs: int) -> None:
        self._most_jobs = most_jobs  # turns kept; all later clients share the last
        self._turns: deque[tuple[float, int]] = deque()  # (time, jobs)
        self._jobs = 0

    def turn_s(self, now_s: float, wait_s: float, each_s: float, jobs: int) -> float:
        """Seconds until the turn of these jobs, which is kept for them.

        The queue will take `wait_s`; each turn that was given out adds `each_s`.
        """
        while self._turns and self._turns[0][0] <= now_s:
            self._jobs -= self._turns.popleft()[1]
        told_s = wait_s + each_s * self._jobs
        if self._jobs + jobs <= self._most_jobs:
            self._turns.append((now_s + told_s, jobs))
            self._jobs += jobs
        return told_s


# A generation may plan with this share of its time only, since more requests will come.
_TARGET_SHARE = 0.6
# The time a request may have spent before admission and still count as new on an idle server.
_USUAL_S = 0.01


class Unread(Protocol):
    """Requests that are not in the scheduler yet, because their input is still being parsed."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...


class NothingUnread:
    """Used where requests are never parsed apart from the engine."""

    waiting = 0
    running = 0


class Admission:
    """Decides which requests the scheduler takes."""

    def __init__(self, scheduler: Scheduler[Work], latency: LatencyModel, limits: Limits) -> None:
        self._scheduler = scheduler
        self._latency = latency
        self._limits = limits
        self._shedders: dict[str, LoadShedder] = {}  # of models that generate, by model
        self._retry_after = RetryAfter(limits.queue_requests)
        self.unread: Unread = NothingUnread()

    def check(self, jobs: Sequence[Job[Work]], now_s: float) -> None:
        """Refuse a request if the queue is full or it cannot be in time."""
        self._check_places(now_s, len(jobs))
        if jobs[0].admitted:
            return
        model_backlog = None
        if jobs[0].lane.kind != "classify":
            model_backlog = self._scheduler.backlog.model_backlog(jobs[0].lane.model)
        for job in jobs:
            if job.deadline is None:
                continue
            if model_backlog is None:
                self._check_classified(job, job.deadline, now_s)
            else:
                size = GenerationSize(job.lengths[0], job.tokens_left, len(jobs), job.beams)
                self._check_written(model_backlog, job.lane, size, job.deadline, now_s)
        self._check_wait(now_s, len(jobs), jobs[0].deadline, model_backlog)

    def check_unread(self, wait_s: float, deadline: Deadline | None, now_s: float) -> None:
        """Refuse a request that would wait too long to be parsed."""
        self._check_places(now_s, 1)
        if deadline is not None:
            if deadline.ends_s <= now_s:
                raise DeadlineLapsed(deadline.given_s)
            if now_s + wait_s > deadline.ends_s:
                raise _too_busy(now_s + wait_s - deadline.ends_s)
        elif wait_s > self._limits.queue_wait_s:
            raise _too_long(wait_s, wait_s)

    def check_early(
        self, key: LaneKey, least: int, most: tuple[int, ...], deadline: Deadline, now_s: float
    ) -> None:
        """Refuse, before it is parsed, a classification that cannot be in time whatever its text.

        `least` is the fewest steps it may get, `most` the most tokens of each row. Not refused
        here: one that may be too long for its deadline even on an idle server, which gets another
        error.
        """
        backlog = self._scheduler.backlog
        late_s = backlog.least_late_s(key, least, deadline.ends_s, now_s)
        if late_s > 0 and backlog.idle_s(key, least, most) <= deadline.given_s:
            raise _too_busy(late_s)

    def steps_for(
        self,
        key: LaneKey,
        choices: Sequence[int],
        size: GenerationSize,
        deadline: Deadline | None,
        now_s: float,
    ) -> int:
        """The most of these steps, ascending, at which generations that come now are in time.

        Refuses them if there are none, so that `check` need not look again.
        """
        model_backlog = self._scheduler.backlog.model_backlog(key.model)
        steps = self._steps_for(model_backlog, key, choices, size, deadline, now_s)
        self._check_places(now_s, size.jobs)
        self._check_wait(now_s, size.jobs, deadline, model_backlog)
        return steps

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._shedders.pop(model, None)

    def _steps_for(
        self,
        model_backlog: ModelBacklog[Work],
        key: LaneKey,
        choices: Sequence[int],
        size: GenerationSize,
        deadline: Deadline | None,
        now_s: float,
    ) -> int:
        if deadline is None:
            shedder = self._shedders.setdefault(key.model, LoadShedder(self._limits.degrade_wait_s))
            share = shedder.share(model_backlog.wait_s(key._replace(steps=choices[-1])))
            fitting = [steps for steps in choices if steps <= share * choices[-1]]
            return fitting[-1] if fitting else choices[0]
        busy = self._scheduler.queued + self._scheduler.running > 0
        for steps in reversed(choices):
            lane = LaneKey(key.model, key.kind, steps)
            if model_backlog.in_time(
                lane, size, deadline.ends_s, now_s, _TARGET_SHARE if busy else 1.0
            ):
                return steps
        self._check_written(model_backlog, lane, size, deadline, now_s)
        return choices[0]

    def _turn_s(self, now_s: float, jobs: int) -> float:
        """When clients that are refused now should come back."""
        backlog = self._scheduler.backlog
        # They are taken to be like the requests that wait.
        each_s = backlog.waiting_s() / max(1, self._scheduler.queued)
        return self._retry_after.turn_s(now_s, backlog.wait_s(now_s), each_s, jobs)

    def _check_places(self, now_s: float, jobs: int) -> None:
        queued = self._scheduler.queued + self.unread.waiting
        if queued + jobs > self._limits.queue_requests:
            raise QueueFull(
                f"the queue is full ({queued} requests): try again later",
                retry_after_s=self._turn_s(now_s, jobs),
            )

    def _check_wait(
        self,
        now_s: float,
        jobs: int,
        deadline: Deadline | None,
        model_backlog: ModelBacklog[Work] | None,
    ) -> None:
        if deadline is not None and deadline.ends_s - now_s <= self._limits.queue_wait_s:
            return  # it will be in time, so its wait is short enough
        wait_s = self._scheduler.backlog.wait_s(now_s, least=True, known=model_backlog)
        if wait_s > self._limits.queue_wait_s:
            raise _too_long(wait_s, self._turn_s(now_s, jobs))

    def _check_classified(self, job: Job[Work], deadline: Deadline, now_s: float) -> None:
        self._scheduler.open(job.lane)
        backlog = self._scheduler.backlog
        late_s = backlog.late_s(job, now_s)
        if late_s > 0:
            least = job.choices[0] if job.lane.late else job.lane.steps
            idle_s = backlog.idle_s(job.lane, least, job.lengths)
            self._refuse(deadline, least, idle_s, late_s, now_s)

    def _check_written(
        self,
        model_backlog: ModelBacklog[Work],
        key: LaneKey,
        size: GenerationSize,
        deadline: Deadline,
        now_s: float,
    ) -> None:
        late_s = model_backlog.late_s(key, size, deadline.ends_s, now_s)
        if late_s > 0:
            self._refuse(deadline, key.steps, model_backlog.idle_s(key, size), late_s, now_s)

    def _refuse(
        self, deadline: Deadline, steps: int, idle_s: float, late_s: float, now_s: float
    ) -> None:
        idle = self._scheduler.queued + self._scheduler.running == 0
        # On the network, in the queue for parsing, and while it was parsed.
        spent_s = max(0.0, now_s - deadline.arrived_s - _USUAL_S)
        if idle:
            if not spent_s:
                self._latency.lower_caution()
            idle_s = max(idle_s, deadline.given_s + late_s - spent_s)
        if idle_s > deadline.given_s:
            raise ImpossibleDeadline(deadline.given_s, idle_s, steps)
        if idle or deadline.ends_s <= now_s:
            raise DeadlineLapsed(deadline.given_s)
        raise _too_busy(late_s)


def _too_long(wait_s: float, retry_after_s: float) -> QueueFull:
    return QueueFull(
        f"what waits will take {wait_s:.0f} s: try again later", retry_after_s=retry_after_s
    )


def _too_busy(late_s: float) -> TooBusy:
    return TooBusy(
        f"behind what waits, the answer may come {late_s * 1000:.0f} ms after deadline_ms: "
        "try again later, or give it more time",
        retry_after_s=late_s,
    )


def too_large(job: Job[Work], needed_bytes: int) -> Unprocessable:
    """The error for a generation that needs more KV cache than the server has."""
    return Unprocessable(
        f"the prompt and max_tokens need {needed_bytes / 2**20:.1f} MiB of cache at "
        f"{steps_in_words(job.lane.steps)}, more than this server has: lower max_tokens or steps",
        param="max_tokens",
    )
