"""The backlog: when a request could start and end, given everything that waits and runs now.

It reads the lanes and never changes them.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from serve.bundle.manifest import LatencyEntry
from serve.engine.classify import ClassifyLane
from serve.engine.cost import IDLE_ANSWER_S, Cost, CostKey, CostLine
from serve.engine.job import Deadline, Job, LaneKey, Turn
from serve.engine.loaded import CachedLane, Call, Common, EngineModel
from serve.errors import DeadlineLapsed, ImpossibleDeadline, QueueFull, TooBusy


class LaneLoad(NamedTuple):
    """What runs and waits in one lane that generates or searches."""

    rows: int  # that run together, now or soon
    max_rows: int  # that may run together
    calls: int  # that a token of each of them takes: searches take turns
    token: CostLine  # the cost of a token of all of them
    prefill_s: float  # of the prompts that are still to be prefilled
    length: int  # of the longest row, to which all are padded, on average
    left: list[int]  # tokens of each that runs
    waiting: int
    waiting_tokens: int  # to decode; the first of each comes from its prefill
    positions: int  # cached, of the longest of those that run or run next
    due: list[Job]  # with a deadline, of the same

    @property
    def tokens(self) -> float:
        """The tokens of each row until nothing is left, if nothing more comes."""
        return (sum(self.left) + self.waiting_tokens) / self.rows


class GenerationSize(NamedTuple):
    """The size of generations or searches that are asked for together."""

    prompt: int  # tokens of the longest
    tokens: int  # to generate, at most, for each
    jobs: int = 1
    beams: int = 1  # of each
    window: int = 0  # cached positions, at most; 0: as many as there are tokens
    read: int | None = None  # tokens of all prompts; None: all are as long

    @property
    def positions(self) -> int:
        """Cached positions of each at its end."""
        return min(self.prompt + self.tokens, self.window or sys.maxsize)

    @property
    def length(self) -> int:
        """The length of each, on average over its tokens."""
        within = self._within
        behind = self.tokens - within
        # A full cache goes on with its last half.
        positions = within * (self.prompt + within // 2) + behind * (self.window * 3 // 4)
        return positions // max(1, self.tokens)

    @property
    def rereads(self) -> int:
        """How often each fills the window, whose last half is read again."""
        behind = self.tokens - self._within
        return -(-behind // (self.window - self.reread)) if behind else 0

    @property
    def reread(self) -> int:
        """The tokens that are read again."""
        return self.window // 2

    @property
    def _within(self) -> int:
        """The tokens of each until its window is full."""
        return min(self.tokens, max(0, self.window - self.prompt)) if self.window else self.tokens


class ModelBacklog:
    """What runs and waits in the lanes of one model that generates, as they are now.

    A search is a row like any other, but each takes a call of its own for a token.
    """

    def __init__(
        self,
        cost: Cost,
        answer_s: float,
        lanes: Iterable[CachedLane],
        max_rows: int,
        beside_s: float,
        shared: bool = False,
        rows_in_memory: Callable[[LaneKey, int, bool], int] | None = None,
        translates: bool = False,
    ) -> None:
        """`beside_s`: other models' work between two calls; `shared` if lanes may share calls.

        `rows_in_memory`: how many rows of a lane fit into memory, by their positions, now or on an
        idle server. If the model `translates`, only sources are cached, and lengths are those of
        answers.
        """
        self._cost, self._answer_s = cost, answer_s
        self._max_rows, self._rows_in_memory = max_rows, rows_in_memory
        self._beside_s, self._translates = beside_s, translates
        self._loads: dict[LaneKey, LaneLoad] = {}
        for lane in lanes:
            inside = lane.occupants()  # once: on its own thread a row may leave meanwhile
            if lane.waiting or inside:
                self._loads[lane.key] = self._load(lane, inside)
        self._prefill_s = sum([load.prefill_s for load in self._loads.values()])
        decoding = [load.rows for key, load in self._loads.items() if key.kind == "generate"]
        self._decode_lanes = max(1, len(decoding))
        # Lanes that do not fit into one call alternate.
        self._in_one_call = shared and sum(decoding) <= max_rows

    def idle_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The time of the whole answers on an idle server."""
        if key.kind == "search":
            search_s = self._cost.search_s(key, size.prompt, size.tokens, size.beams)
            return size.jobs * search_s + IDLE_ANSWER_S
        most_rows = self._fitting(key, self._positions(size), idle=True)
        fixed_s, each_s = self._cost.token(key, min(most_rows, size.jobs))
        token_s = fixed_s + each_s * self._length(size)
        decoded_s = _rounds(size, most_rows) * (size.tokens - 1) * token_s
        return self._prompts_s(key, size) + decoded_s + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The time until the last token of all of them; seldom longer."""
        load = self._loads.get(key)
        max_rows = self._most_rows(key, size)
        first = 0.0 if load is None else tokens_until_slot(load, max_rows)
        queue_s = self._until_slot_s(key, max_rows) + self._prefill_s
        return (queue_s + self._run_s(key, size, first)) * self._cost.caution + self._answer_s

    def beside_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The same if nothing waited: beside what runs now, for as long as it runs."""
        return self._run_s(key, size, 0.0) * self._cost.caution + self._answer_s

    def next_end_s(self) -> float:
        """The time until one of those that run is complete; 0 if none runs."""
        ends = [
            self._tokens_s(key, load.calls, load.length, 0.0, min(load.left))
            for key, load in self._loads.items()
            if load.left
        ]
        return min(ends, default=0.0)

    def late_s(
        self, key: LaneKey, size: GenerationSize, ends_s: float, now_s: float, share: float = 1.0
    ) -> float:
        """How late these, or a generation that they delay, would be at worst. Not above 0: in time.

        Each may use `share` of the time left to it. Generations that will be late anyway do not
        count.
        """
        worst_s = self.ready_s(key, size) - share * (ends_s - now_s)
        begin_s, caution = now_s + self._answer_s, self._cost.caution
        read_s = self._prefill_s + self._prompts_s(key, size)
        new_calls, (more_fixed_s, more_each_s) = self._more(key, size)
        for other, load in self._loads.items():
            if not load.due:
                continue
            ratio = self._ratio(other, load.calls, key, new_calls)
            more_s = more_fixed_s + more_each_s * load.length
            for job in load.due:
                left, left_s = job.tokens_left, job.ends_s - begin_s
                work_s = self._tokens_s(other, load.calls, load.length, 0.0, left)
                if caution * (self._prefill_s + work_s) <= left_s:
                    work_s += read_s + min(left * ratio, self._decoded(key, size)) * more_s
                    worst_s = max(worst_s, caution * work_s - share * left_s)
        return worst_s

    def wait_s(self, key: LaneKey) -> float:
        """The time until a slot is free for one more of this lane, behind those that wait."""
        load = self._loads.get(key)
        return 0.0 if load is None else self._until_slot_s(key, load.max_rows) + load.prefill_s

    def all_begin_s(self) -> float:
        """The time until no generation waits for a slot."""
        waiting = [key for key, load in self._loads.items() if load.waiting]
        return max(map(self.wait_s, waiting), default=0.0)

    def waiting_s(self) -> float:
        """The part of that which waiting generations cause."""
        most_s = 0.0
        for key, load in self._loads.items():
            if load.waiting:
                tokens = load.waiting_tokens / load.max_rows
                tokens_s = self._tokens_s(key, load.calls, load.length, 0.0, tokens)
                most_s = max(most_s, load.prefill_s + tokens_s)
        return most_s

    def _load(self, lane: CachedLane, inside: Sequence[Job]) -> LaneLoad:
        key, waiting = lane.key, len(lane.waiting)
        next_ones = [*inside, *islice(lane.waiting, self._max_rows)]
        positions = max([job.positions for job in next_ones])
        max_rows = max(len(inside), self._fitting(key, positions))
        rows = min(max_rows, len(inside) + waiting)
        unread = [job for job in inside if job.tokens_left == job.most_tokens]
        prompts = len(unread) + waiting
        tokens = sum([job.lengths[0] for job in unread]) + lane.waiting.prompt_tokens
        prefill_s = self._cost.prompts_s(key, tokens, prompts) if prompts else 0.0
        first = next_ones[0]
        begin, end = first.lengths[0], first.positions
        if self._translates:
            begin, end = 1, first.most_tokens
        # Rows began at random times, so the longest is on average this far through its tokens.
        length = begin + (end - begin) * rows // (rows + 1)
        if key.kind == "search":
            running = next_ones[:rows]
            each_s = [
                self._cost.search_call_s(key, job.beams, job.most_tokens // 2 + 1)
                for job in running
            ]
            calls, token = rows, (sum(each_s), 0.0)
        else:
            calls, token = 1, self._cost.token(key, rows)
        return LaneLoad(
            *(rows, max_rows, calls, token, prefill_s, length),
            [job.tokens_left for job in inside],
            *(waiting, lane.waiting.tokens - waiting, positions),
            [job for job in next_ones if job.ends_s < math.inf],
        )

    def _ratio(self, key: LaneKey, calls: int, other: LaneKey, other_calls: int) -> float:
        """Tokens of another lane to one of this."""
        if key == other:
            return 1.0
        if "search" in (key.kind, other.kind):  # a call of each in turn
            own = calls if key.kind == "search" else self._decode_lanes
            return own / (other_calls if other.kind == "search" else self._decode_lanes)
        ratio = key.steps / other.steps
        return ratio if self._in_one_call else math.sqrt(max(1.0, ratio))

    def _tokens_s(self, key: LaneKey, calls: int, length: int, first: float, last: float) -> float:
        """The time between two tokens of a lane, with the rows of all lanes."""
        tokens = last - first
        seconds = tokens * calls * self._beside_s
        for other, load in self._loads.items():
            ratio = self._ratio(key, calls, other, load.calls)
            count = tokens * ratio
            if "search" in (key.kind, other.kind):  # whose places nobody takes at once
                count = min(count, max(0.0, load.tokens - first * ratio))
            seconds += count * (load.token[0] + load.token[1] * length)
        return seconds

    def _rows(self, key: LaneKey, size: GenerationSize, beside: int) -> tuple[int, CostLine]:
        """The rows of a lane with these beside others, and the cost of a token of all of them."""
        rows = min(self._most_rows(key, size), beside + size.jobs)
        if key.kind == "generate":
            return rows, self._cost.token(key, rows)
        return rows, (rows * self._cost.search_call_s(key, size.beams, size.tokens // 2 + 1), 0.0)

    def _more(self, key: LaneKey, size: GenerationSize) -> tuple[int, CostLine]:
        """The calls of a token of the lane with these, and how much longer a token takes."""
        load = self._loads.get(key)
        rows, (fixed_s, each_s) = self._rows(key, size, 0 if load is None else load.rows)
        if load is not None:
            _, (known_fixed_s, known_each_s) = self._rows(key, size._replace(jobs=0), load.rows)
            fixed_s, each_s = fixed_s - known_fixed_s, each_s - known_each_s
        return rows if key.kind == "search" else 1, (fixed_s, each_s)

    def _run_s(self, key: LaneKey, size: GenerationSize, first: float) -> float:
        """The time of all of these from their prompts on, `first` tokens from now."""
        load = self._loads.get(key)
        calls, (more_fixed_s, more_each_s) = self._more(key, size)
        length = max(0 if load is None else load.length, self._length(size))
        tokens = self._decoded(key, size)
        work_s = self._tokens_s(key, calls, length, first, first + tokens)
        return work_s + tokens * (more_fixed_s + more_each_s * length) + self._prompts_s(key, size)

    def _until_slot_s(self, key: LaneKey, max_rows: int) -> float:
        """The time until a slot of a lane is free, without the prompts prefilled until then."""
        load = self._loads.get(key)
        if load is None:
            return 0.0
        tokens = tokens_until_slot(load, max_rows)
        return self._tokens_s(key, load.calls, load.length, 0.0, tokens)

    def _decoded(self, key: LaneKey, size: GenerationSize) -> int:
        """Tokens to decode, one after another; the first of each comes from its prefill."""
        return _rounds(size, self._most_rows(key, size)) * (size.tokens - 1)

    def _most_rows(self, key: LaneKey, size: GenerationSize) -> int:
        """The rows of a lane that run together when these are among them."""
        load, positions = self._loads.get(key), self._positions(size)
        if load is None or positions <= load.positions:
            return self._fitting(key, positions) if load is None else load.max_rows
        return max(len(load.left), self._fitting(key, positions))

    def _positions(self, size: GenerationSize) -> int:
        return size.prompt if self._translates else size.positions

    def _length(self, size: GenerationSize) -> int:
        return size.tokens // 2 + 1 if self._translates else size.length

    def _fitting(self, key: LaneKey, positions: int, idle: bool = False) -> int:
        if self._rows_in_memory is None:
            return self._max_rows
        return min(self._max_rows, self._rows_in_memory(key, positions, idle))

    def _prompts_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The time to read prompts, and what full windows keep."""
        read = size.jobs * size.prompt if size.read is None else size.read
        seconds = self._cost.prompts_s(key, size.prompt, 1)
        if size.jobs > 1:
            seconds += self._cost.prompts_s(key, read - size.prompt, size.jobs - 1)
        if again := size.jobs * size.rereads:
            seconds += self._cost.prompts_s(key, again * size.reread, again)
        return seconds


def _rounds(size: GenerationSize, most_rows: int) -> int:
    """Rounds that these jobs take one after another, with at most so many rows in each."""
    return -(-size.jobs // most_rows)


def tokens_until_slot(load: LaneLoad, max_rows: int) -> float:
    """The tokens of each row until a slot of a lane is free for one more."""
    behind = load.waiting + len(load.left) - max_rows
    if behind < 0:
        return 0.0
    if behind < len(load.left):
        return sorted(load.left)[behind]
    # What running rows have left when a slot is free: at least as much beyond the first to end as
    # now, and no less than what prefilling one prompt after the other puts between them.
    running, each = sum(load.left), load.waiting_tokens / load.waiting
    after = running - len(load.left) * min(load.left) if load.left else 0
    apart = (max_rows - 1) * min(each, max_rows) / 2
    return (running + load.waiting_tokens - max(after, apart)) / max_rows


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


class Backlog:
    """Everything that waits and runs, in seconds: which requests may queue, and at how many steps.

    Admission, deadlines, load shedding and Retry-After ask it. Call with the engine's lock held.
    """

    def __init__(self, common: Common) -> None:
        self._common = common
        self._limits, self._jobs = common.limits, common.jobs
        self._retry_after = RetryAfter(common.limits.queue_requests)
        self._busy_until_s = 0.0

    def begin(self, call: Call, now_s: float) -> None:
        seconds = call.seconds
        if seconds is None and call.kind is not None:
            seconds = call.by.model.cost.usual_s((call.lane, call.kind))
        self._busy_until_s = now_s + (seconds or 0.0)

    def rest(self) -> None:
        """Nothing runs now."""
        self._busy_until_s = 0.0

    def check(self, jobs: Sequence[Job], now_s: float) -> None:
        """Refuse a request if the queue is full or it cannot be in time."""
        self._check_places(now_s, len(jobs))
        first = jobs[0]  # of several texts to generate, which differ in their prompts only
        if first.admitted:
            return
        if first.deadline is not None and first.lane.kind == "classify":
            self._check_classified(first, first.deadline, now_s)
        elif first.deadline is not None:
            model_backlog = self.of_model(self._common.models[first.lane.model])
            lengths = [job.lengths[0] for job in jobs]
            size = GenerationSize(
                *(max(lengths), first.tokens_left, len(jobs), first.beams, first.window),
                sum(lengths),
            )
            self._check_written(model_backlog, first.lane, size, first.deadline, now_s)
        self._check_wait(now_s, len(jobs), first.deadline)

    def check_unread(self, wait_s: float, deadline: Deadline | None, now_s: float) -> None:
        """Refuse a request that would wait too long to be parsed."""
        self._check_places(now_s, 1)
        if deadline is not None:
            if deadline.ends_s <= now_s:
                raise DeadlineLapsed(deadline.given_s)
            if now_s + wait_s > deadline.ends_s:
                raise _too_busy(now_s + wait_s - deadline.ends_s)
        if wait_s > self._limits.queue_wait_s:
            raise _too_long(wait_s, wait_s)

    def check_early(
        self,
        key: LaneKey,
        least: int,
        shortest: tuple[int, ...],
        longest: tuple[int, ...],
        deadline: Deadline,
        now_s: float,
    ) -> None:
        """Refuse, before it is parsed, a classification that cannot be in time whatever its text.

        `least` is the fewest steps it may get, `shortest` and `longest` the tokens that each row
        may have. Not refused here for its place in the queue: one that may be too long for its
        deadline even on an idle server, which gets another error.
        """
        lane = self._classify_lane(key)
        if lane is None:
            return
        idle_s = lane.idle_s(least, shortest)
        if idle_s > deadline.given_s:
            if self._jobs.idle:
                self._common.lower_caution()
            raise ImpossibleDeadline(deadline.given_s, idle_s, least)
        late_s = lane.least_late_s(least, deadline.ends_s, max(now_s, self._busy_until_s))
        if late_s > 0 and lane.idle_s(least, longest) <= deadline.given_s:
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

        And at which their cache fits into memory, where it does at any of them.
        Refuses them if there are none, so that `check` need not look again.
        """
        model = self._common.model(key)
        model_backlog = self.of_model(model)
        cached = size.positions if size.window else size.prompt  # of a translation, the source
        cache_bytes = self._limits.cache_bytes
        fitting = [one for one in choices if model.batches(one).bytes_for(cached) <= cache_bytes]
        choices = fitting or choices[:1]
        if deadline is None:
            share = model.shedder.share(model_backlog.wait_s(key._replace(steps=choices[-1])))
            fitting = [one for one in choices if one <= share * choices[-1]]
            steps = fitting[-1] if fitting else choices[0]
        else:
            share = 1.0 if self._jobs.idle else _TARGET_SHARE
            for steps in reversed(choices):
                lane = LaneKey(key.model, key.kind, steps)
                if model_backlog.late_s(lane, size, deadline.ends_s, now_s, share) <= 0:
                    break
            else:  # at the fewest, with all of its time
                self._check_written(model_backlog, lane, size, deadline, now_s)
        self._check_places(now_s, size.jobs)
        self._check_wait(now_s, size.jobs, deadline)
        return steps

    def _turn_s(self, now_s: float, jobs: int) -> float:
        """When clients that are refused now should come back.

        Not later than the queue can be long: of those that were told to come first, many may not.
        """
        # They are taken to be like the requests that wait.
        each_s = self.waiting_s() / max(1, self._jobs.queued)
        wait_s = self.wait_s(now_s)
        turn_s = self._retry_after.turn_s(now_s, wait_s, each_s, jobs)
        turn_s = min(turn_s, max(wait_s, self._limits.queue_wait_s))
        return max(turn_s, self._common.unread.wait_s())

    def _check_places(self, now_s: float, jobs: int) -> None:
        queued = self._jobs.queued + self._common.unread.waiting
        if queued + jobs > self._limits.queue_requests:
            raise QueueFull(
                f"the queue is full ({queued} requests): try again later",
                retry_after_s=self._turn_s(now_s, jobs),
            )

    def _check_wait(self, now_s: float, jobs: int, deadline: Deadline | None) -> None:
        if deadline is not None and deadline.ends_s - now_s <= self._limits.queue_wait_s:
            return  # it will be in time, so its wait is short enough
        wait_s = self.wait_s(now_s, least=True)
        if wait_s > self._limits.queue_wait_s:
            raise _too_long(wait_s, self._turn_s(now_s, jobs))

    def _check_classified(self, job: Job, deadline: Deadline, now_s: float) -> None:
        lane = self._classify_lane(job.lane)
        assert lane is not None, "opened before"
        beside_s = self._common.busy_s((job.lane, "classify"))
        late_s = lane.late_s(job, max(now_s, self._busy_until_s), beside_s)
        if late_s > 0:
            least = job.choices[0] if job.lane.late else job.lane.steps
            idle_s = lane.idle_s(least, job.lengths)
            slowed = idle_s + beside_s > deadline.given_s
            self._refuse(deadline, least, idle_s, late_s, slowed, now_s)

    def _check_written(
        self,
        model_backlog: ModelBacklog,
        key: LaneKey,
        size: GenerationSize,
        deadline: Deadline,
        now_s: float,
    ) -> None:
        late_s = model_backlog.late_s(key, size, deadline.ends_s, now_s)
        if late_s > 0:
            own_late_s = model_backlog.ready_s(key, size) - (deadline.ends_s - now_s)
            slowed = own_late_s <= 0 or model_backlog.beside_s(key, size) > deadline.given_s
            # As it would be predicted on an idle server, which would refuse less than that.
            idle_s = model_backlog.idle_s(key, size) * self._common.models[key.model].cost.caution
            self._refuse(deadline, key.steps, idle_s, late_s, slowed, now_s)

    def _next_end_s(self) -> float:
        """The time until the first of the running generations and searches is complete."""
        ends = [self.of_model(one).next_end_s() for one in self._common.models.values()]
        return min([end for end in ends if end > 0], default=0.0)

    def _refuse(
        self,
        deadline: Deadline,
        steps: int,
        idle_s: float,
        late_s: float,
        slowed: bool,
        now_s: float,
    ) -> None:
        """Refuse what would be `late_s` late.

        `slowed`: not because of what waits alone, but of what runs beside it. An empty queue does
        not help then; the end of one of those that run may.
        """
        idle = self._jobs.idle
        # On the network, in the queue for parsing, and while it was parsed.
        spent_s = now_s - deadline.arrived_s
        if spent_s <= _USUAL_S:
            spent_s = 0.0
        if idle:
            if not spent_s:
                self._common.lower_caution()
            idle_s = max(idle_s, deadline.given_s + late_s - spent_s)
        if idle_s > deadline.given_s:
            raise ImpossibleDeadline(deadline.given_s, idle_s, steps)
        if idle or deadline.ends_s <= now_s:
            raise DeadlineLapsed(deadline.given_s)
        raise _too_busy(late_s, self._next_end_s() if slowed else 0.0)

    # Seconds.

    def wait_s(self, now_s: float, least: bool = False) -> float:
        """The time until all that waits now has run, at the fewest steps or the likely ones."""
        writing_s = max(
            [one.all_begin_s() * lasting for one, lasting in self._waiting()], default=0.0
        )
        return max(0.0, self._busy_until_s - now_s) + self._classify_s(least) + writing_s

    def waiting_s(self) -> float:
        """The same for waiting work only, without what runs."""
        writing_s = max(
            [one.waiting_s() * lasting for one, lasting in self._waiting()], default=0.0
        )
        return self._classify_s(least=False) + writing_s

    def answer_s(self, key: LaneKey, measured: LatencyEntry | None) -> float | None:
        """The time until one call of this lane would be over if it were asked for now.

        Every lane with work gets one call a round, so it takes as many rounds as the lane has
        calls ahead, and one more. The call has the measured size, or the usual one.
        """
        own: Turn = (key, "classify" if key.kind == "classify" else "decode")
        model = self._common.models[key.model]
        call_s = None
        if measured is not None:
            cost_key = CostKey(measured.kind, key.steps)
            call_s = model.cost.call_s(cost_key, measured.batch, measured.length)
            call_s = call_s or measured.median_ms / 1000
        call_s = call_s or model.cost.usual_s(own)
        if call_s is None:
            return None
        lane = model.lanes.get(key)
        ahead = lane.calls_ahead if isinstance(lane, ClassifyLane) else 0
        return (call_s + self._common.busy_s(own)) * (ahead + 1)

    def of_model(self, model: EngineModel) -> ModelBacklog:
        """The backlog of one model that generates, as it is now."""
        return ModelBacklog(
            model.cost,
            self._common.answer.seconds,
            model.cached,
            self._limits.decode_rows,
            sum([one.busy_s() for one in self._common.models.values() if one is not model]),
            model.shares_calls,
            partial(self._common.rows_in_memory, model),
            model.manifest.task == "translate",
        )

    def _classify_lane(self, key: LaneKey) -> ClassifyLane | None:
        model = self._common.models.get(key.model)
        lane = None if model is None else model.lanes.get(key)
        assert lane is None or isinstance(lane, ClassifyLane)
        return lane

    def _classify_s(self, least: bool) -> float:
        """The time until all queues of classifications are empty."""
        return sum(
            lane.wait_s(least) * model.cost.lasting
            for model in self._common.models.values()
            for lane in model.lanes.values()
            if isinstance(lane, ClassifyLane) and lane.waiting
        )

    def _waiting(self) -> list[tuple[ModelBacklog, float]]:
        """The backlogs of models for which generations wait, and the factor on each."""
        return [
            (self.of_model(model), model.cost.lasting)
            for model in self._common.models.values()
            if any([lane.waiting for lane in model.cached])
        ]


def _too_long(wait_s: float, retry_after_s: float) -> QueueFull:
    return QueueFull(
        f"what waits will take {wait_s:.0f} s: try again later", retry_after_s=retry_after_s
    )


def _too_busy(late_s: float, next_end_s: float = 0.0) -> TooBusy:
    return TooBusy(
        f"behind what waits, the answer may come {late_s * 1000:.0f} ms after deadline_ms: "
        "try again later, or give it more time",
        retry_after_s=max(late_s, next_end_s),
    )
