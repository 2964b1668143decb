"""The backlog: when a request could start and end, given everything that waits and runs now.

It reads the lanes and never changes them.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from serve.bundle.manifest import LatencyEntry
from serve.engine.classify import ClassifyLane
from serve.engine.cost import IDLE_ANSWER_S, Cost, CostKey, CostLine
from serve.engine.generate import GenerateLane
from serve.engine.job import Deadline, Job, LaneKey, Turn
from serve.engine.loaded import Call, Common, LoadedModel
from serve.engine.search import SearchLane
from serve.errors import DeadlineLapsed, ImpossibleDeadline, QueueFull, TooBusy


class BusyLane(NamedTuple):
    """A lane with generations that wait or run."""

    lane: GenerateLane
    occupants: Sequence[Job]
    rows: int  # that decode in one batch, now or soon
    token: CostLine  # cost of a token of those rows
    prefill_s: float  # time of the prompts to prefill
    length: int  # of the longest row, to which all are padded, on average

    @property
    def tokens_waiting(self) -> int:
        """Tokens to decode for all that wait; the first token of each comes from its prefill."""
        return self.lane.waiting_tokens - len(self.lane.waiting)

    @property
    def tokens_left(self) -> int:
        """Tokens to decode for all that run and wait."""
        return sum([job.tokens_left for job in self.occupants]) + self.tokens_waiting


class DecodeBacklog:
    """The decode work of one model, from its lanes as they are now."""

    def __init__(
        self,
        lanes: Iterable[GenerateLane],
        costs: Cost,
        max_rows: int,
        beside_s: float,
        shared: bool = False,
    ) -> None:
        """`shared` if lanes whose rows fit share calls."""
        self.busy: dict[LaneKey, BusyLane] = {}
        self.prefill_s = 0.0  # of all prompts that still wait for prefill
        self._costs = costs
        self._max_rows = max_rows
        self._beside_s = beside_s  # other models' work between two calls
        self._tokens: list[tuple[int, CostLine]] = []  # (steps, cost) of each lane
        self._rounds: dict[int, CostLine] = {}  # by steps
        self._until_slot: dict[LaneKey, tuple[float, float]] = {}
        for lane in lanes:
            occupants, waiting = lane.occupants(), len(lane.waiting)
            rows = len(occupants) + waiting
            if rows:
                rows = rows if rows < max_rows else max_rows
                unread, prompts, prefill_s = lane.waiting_prompt_tokens, waiting, 0.0
                if lane.unread is not None:
                    unread, prompts = unread + lane.unread.lengths[0], prompts + 1
                if prompts:
                    prefill_s = costs.prompts_s(lane.key, unread, prompts)
                    self.prefill_s += prefill_s
                token = costs.token(lane.key, rows)
                self._tokens.append((lane.key.steps, token))
                # Rows began at random times, so the longest is on average this far through its
                # tokens.
                first = occupants[0] if occupants else lane.waiting[0]
                prompt = first.lengths[0]
                length = prompt + (first.positions - prompt) * rows // (rows + 1)
                self.busy[lane.key] = BusyLane(lane, occupants, rows, token, prefill_s, length)
        # Lanes that do not fit into one call alternate.
        self._in_one_call = shared and sum([one.rows for one in self.busy.values()]) <= max_rows

    @property
    def calls(self) -> int:
        """Decode calls in a round, in which every lane gets a token."""
        if len(self.busy) < 2:
            return 1
        return max(len(self.busy), *(one.lane.calls_a_token for one in self.busy.values()))

    def token_ratio(self, steps: int, other: int) -> float:
        """Tokens of a lane of `other` steps to one of a lane of `steps`: see DecodeLanes."""
        if self._in_one_call:
            return steps / other
        return 1.0 if steps <= other else math.sqrt(steps / other)

    def round(self, steps: int) -> CostLine:
        """The time between two tokens of a lane of these steps, with the rows of all lanes."""
        line = self._rounds.get(steps)
        if line is None:
            fixed_s, each_s = self._beside_s, 0.0
            in_one = self._in_one_call
            for other, (other_fixed_s, other_each_s) in self._tokens:
                ratio = steps / other  # as in `token_ratio`, inlined: asked on every request
                token_ratio = ratio if in_one else 1.0 if ratio <= 1.0 else math.sqrt(ratio)
                fixed_s += token_ratio * other_fixed_s
                each_s += token_ratio * other_each_s
            line = self._rounds[steps] = fixed_s, each_s
        return line

    def more(self, key: LaneKey, jobs: int) -> CostLine:
        """How much longer a token of a lane takes with more rows."""
        busy = self.busy.get(key)
        if busy is None:
            return self._costs.token(key, min(self._max_rows, jobs))
        if busy.rows == self._max_rows:
            return 0.0, 0.0
        fixed_s, each_s = self._costs.token(key, min(self._max_rows, busy.rows + jobs))
        return fixed_s - busy.token[0], each_s - busy.token[1]

    def until_slot(self, key: LaneKey) -> tuple[float, float]:
        """(tokens, seconds) until a slot is free, without the prompts prefilled until then."""
        place = self._until_slot.get(key)
        if place is None:
            busy = self.busy.get(key)
            place = self._until_slot[key] = (
                (0.0, 0.0) if busy is None else self._lane_until_slot(busy)
            )
        return place

    def waiting_s(self, busy: BusyLane) -> float:
        """What the waiting generations add to the time until a slot is free."""
        fixed_s, each_s = self.round(busy.lane.key.steps)
        tokens = busy.tokens_waiting / self._max_rows
        return busy.prefill_s + tokens * (fixed_s + each_s * busy.length)

    def seconds(self, calls: float) -> float:
        """The time of decoding within this many calls, if there is that much to do."""
        total_s = rounds = 0.0
        for busy in self.busy.values():
            tokens = busy.tokens_left / busy.rows
            total_s += tokens * (busy.token[0] + busy.token[1] * busy.length)
            rounds = max(rounds, tokens)
        needed = rounds * self.calls
        return total_s if needed <= calls else total_s * calls / needed

    def _lane_until_slot(self, busy: BusyLane) -> tuple[float, float]:
        lane, left = busy.lane, [job.tokens_left for job in busy.occupants]
        waiting = len(lane.waiting)
        if (behind := waiting + len(left) - self._max_rows) < 0:
            return 0.0, 0.0
        if behind < len(left):
            left.sort()
            tokens: float = left[behind]
        else:
            # What running rows have left when a slot is free: at least as much beyond the first to
            # end as now, and no less than what prefilling one prompt after the other puts between
            # them.
            running, all_waiting = sum(left), lane.waiting_tokens - waiting
            after: float = running - len(left) * min(left) if left else 0
            most = all_waiting / waiting
            apart = (self._max_rows - 1) * (most if most < self._max_rows else self._max_rows) / 2
            after = after if after > apart else apart
            tokens = (running + all_waiting - after) / self._max_rows
        fixed_s, each_s = self.round(lane.key.steps)
        return tokens, tokens * (fixed_s + each_s * busy.length)


class LaneWork(NamedTuple):
    """Calls of one lane and their time."""

    calls: float
    seconds: float


class DueSearch(NamedTuple):
    """A search with a deadline, and what its lane runs until it ends."""

    lane: LaneKey
    left: int  # calls of its own
    until: LaneWork
    ends_s: float


class _Search(NamedTuple):
    left: int  # calls
    each_s: float
    ends_s: float


class _Lane(NamedTuple):
    searches: list[_Search]  # running ones first, then waiting ones
    running: int
    all: LaneWork


class SearchBacklog:
    """The beam searches of one model as they are now, and one that may come.

    A call takes one search of a lane one token further; the searches take turns.
    """

    def __init__(
        self,
        lanes: Iterable[SearchLane],
        costs: Cost,
        max_rows: int,
    ) -> None:
        self._costs = costs
        self._max_rows = max_rows
        self._lanes: dict[LaneKey, _Lane] = {}
        for lane in lanes:
            searches = [self._search(job) for job in (*lane.running, *lane.waiting)]
            if searches:
                calls = sum(one.left for one in searches)
                seconds = sum(one.left * one.each_s for one in searches)
                self._lanes[lane.key] = _Lane(searches, len(lane.running), LaneWork(calls, seconds))
        self.idle = not self._lanes

    def seconds(self, calls: float, but: LaneKey | None = None) -> float:
        """The time of all lanes but `but` while other work makes this many calls."""
        return sum(
            lane.all.seconds * min(1.0, calls / lane.all.calls)
            for key, lane in self._lanes.items()
            if key != but
        )

    def until_done(self, key: LaneKey, tokens: int, jobs: int, seconds: float) -> LaneWork:
        """What the lane runs until these further searches, of this many tokens each, are over."""
        lane = self._lanes.get(key)
        calls = jobs * tokens
        if lane is None:
            return LaneWork(calls, seconds)
        # Searches that run beside them make as many calls as they do; searches ahead of them make
        # all.
        shared = len(lane.searches) + jobs <= self._max_rows
        ahead = _within(lane.searches, tokens) if shared else lane.all
        return LaneWork(ahead.calls + calls, ahead.seconds + seconds)

    def until_slot(self, key: LaneKey) -> LaneWork:
        """What the lane runs until a slot is free for one more search behind the waiting ones."""
        lane = self._lanes.get(key)
        behind = 0 if lane is None else len(lane.searches) - self._max_rows
        if lane is None or behind < 0:
            return LaneWork(0, 0.0)
        if behind >= lane.running:
            return lane.all
        # Searches that end before that are replaced by others.
        left = sorted(one.left for one in lane.searches[: lane.running])[behind]
        calls = min(lane.all.calls, left * self._max_rows)
        return LaneWork(calls, lane.all.seconds * calls / lane.all.calls)

    def waiting(self) -> list[LaneKey]:
        """Lanes in which a search waits for a slot."""
        return [key for key, lane in self._lanes.items() if len(lane.searches) > lane.running]

    def due(self) -> Iterator[DueSearch]:
        """Searches with a deadline among those that run or run next."""
        for key, lane in self._lanes.items():
            calls, seconds = 0, 0.0
            for place, one in enumerate(islice(lane.searches, 2 * self._max_rows)):
                calls, seconds = calls + one.left, seconds + one.left * one.each_s
                if one.ends_s < math.inf:
                    runs = place < self._max_rows
                    until = self._until(lane, place) if runs else LaneWork(calls, seconds)
                    yield DueSearch(key, one.left, until, one.ends_s)

    def _search(self, job: Job) -> _Search:
        key, left, beams = job.lane, job.tokens_left, job.beams
        if left < job.most_tokens:
            each_s = self._costs.search_call_s(key, beams, job.most_tokens - left // 2)
        else:
            each_s = self._costs.search_s(key, job.lengths[0], left, beams) / max(1, left)
        return _Search(max(1, left), each_s, job.ends_s)

    def _until(self, lane: _Lane, place: int) -> LaneWork:
        """What the lane runs until this search, which has a slot, is done."""
        left = lane.searches[place].left
        along = lane.searches[: self._max_rows]
        if len(lane.searches) <= self._max_rows:
            return _within(along, left)
        # Searches that end before that are replaced by others.
        return LaneWork(left * len(along), left * sum(one.each_s for one in along))


def _within(searches: Iterable[_Search], calls: int) -> LaneWork:
    """What these run while each makes this many calls, or all it needs."""
    counted = [(min(one.left, calls), one.each_s) for one in searches]
    return LaneWork(sum(count for count, _ in counted), sum(count * s for count, s in counted))


class GenerationSize(NamedTuple):
    """The size of generations or searches that are asked for together."""

    prompt: int  # tokens of each
    tokens: int  # to generate, at most, for each
    jobs: int = 1
    beams: int = 1  # of each


class _NewWork(NamedTuple):
    """New generations: when they would be ready, and what they cost others."""

    steps: int
    ready_s: float
    read_s: float = 0.0  # of prefill
    more: CostLine = (0.0, 0.0)  # added to each token of others
    calls: int = 0  # of searches, alternating with those of others
    each_s: float = 0.0  # of one of those calls


class ModelBacklog:
    """The backlog of one model that generates."""

    def __init__(
        self,
        costs: Cost,
        answer_s: float,
        lanes: Iterable[GenerateLane],
        searches: Iterable[SearchLane],
        max_rows: int,
        beside_s: float,
        shared: bool = False,
    ) -> None:
        self._caution, self._answer_s = costs.caution, answer_s
        self._max_rows = max_rows
        self._costs = costs
        self._decode_backlog = DecodeBacklog(lanes, costs, max_rows, beside_s, shared)
        self._search_backlog = SearchBacklog(searches, costs, max_rows)
        self._beside_s = beside_s  # other models' work between two calls

    def token_s(self, key: LaneKey, rows: int, length: int) -> float:
        """The time of a token with this many rows in the batch; 0 if nothing is known."""
        fixed_s, each_s = self._costs.token(key, rows)
        return fixed_s + each_s * length

    def idle_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The time of the whole answers on an idle server."""
        if key.kind == "search":
            return size.jobs * self._searched_s(key, size) + IDLE_ANSWER_S
        each_s = self.token_s(key, min(self._max_rows, size.jobs), _length(size))
        return self._prompts_s(key, size) + self._decoded_tokens(size) * each_s + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The time until the last token of all of them; seldom longer."""
        return self._new(key, size).ready_s

    def late_s(
        self, key: LaneKey, size: GenerationSize, ends_s: float, now_s: float, share: float = 1.0
    ) -> float:
        """How late these, or a generation that they delay, would be at worst. Not above 0: in time.

        Each may use `share` of the time left to it. Generations that will be late anyway do not
        count.
        """
        new = self._new(key, size)
        own_s = new.ready_s - share * (ends_s - now_s)
        return max(own_s, max(self._pushed_s(new, now_s, share), default=own_s))

    def in_time(
        self, key: LaneKey, size: GenerationSize, ends_s: float, now_s: float, share: float = 1.0
    ) -> bool:
        """Whether neither these nor any others would be late because of them."""
        left_s = share * (ends_s - now_s)
        if self._decode_backlog.until_slot(key)[1] * self._caution > left_s:
            return False  # too late whatever else waits
        new = self._new(key, size)
        if new.ready_s > left_s:
            return False
        return max(self._pushed_s(new, now_s, share), default=0.0) <= 0

    def wait_s(self, key: LaneKey) -> float:
        """The time until a slot is free for one more of this lane, behind those that wait."""
        if key.kind == "search":
            place = self._search_backlog.until_slot(key)
            return place.seconds + self._beside_search_s(key, place.calls) if place.calls else 0.0
        busy = self._decode_backlog.busy.get(key)
        return 0.0 if busy is None else self._begin_s(busy)

    def all_begin_s(self) -> float:
        """The time until no generation waits for a slot."""
        lanes = [busy for busy in self._decode_backlog.busy.values() if busy.lane.waiting]
        if self._search_backlog.idle:
            place = self._decode_backlog.until_slot
            return max([place(one.lane.key)[1] + one.prefill_s for one in lanes], default=0.0)
        waits = [*map(self._begin_s, lanes), *map(self.wait_s, self._search_backlog.waiting())]
        return max(waits, default=0.0)

    def waiting_s(self) -> float:
        """The part of that which waiting generations cause."""
        lanes = [busy for busy in self._decode_backlog.busy.values() if busy.lane.waiting]
        searches = map(self.wait_s, self._search_backlog.waiting())
        return max([*map(self._decode_backlog.waiting_s, lanes), *searches], default=0.0)

    def _begin_s(self, busy: BusyLane) -> float:
        tokens, slot_s = self._decode_backlog.until_slot(busy.lane.key)
        if not self._search_backlog.idle:
            slot_s += self._searches_s(tokens)
        return slot_s + busy.prefill_s

    def _new(self, key: LaneKey, size: GenerationSize) -> _NewWork:
        if key.kind == "search":
            calls = size.jobs * size.tokens
            seconds = size.jobs * self._searched_s(key, size)
            until = self._search_backlog.until_done(key, size.tokens, size.jobs, seconds)
            work_s = until.seconds + self._beside_search_s(key, until.calls)
            ready_s = work_s * self._caution + self._answer_s
            return _NewWork(key.steps, ready_s, calls=calls, each_s=seconds / calls)
        more = more_fixed_s, more_each_s = self._decode_backlog.more(key, size.jobs)
        fixed_s, each_s = self._decode_backlog.round(key.steps)
        busy, length = self._decode_backlog.busy.get(key), _length(size)
        if busy is not None and busy.length > length:
            length = busy.length
        round_s = fixed_s + more_fixed_s + (each_s + more_each_s) * length
        tokens, slot_s = self._decode_backlog.until_slot(key)
        decoded = self._decoded_tokens(size)
        read_s = self._prompts_s(key, size)
        work_s = slot_s + (self._decode_backlog.prefill_s + read_s) + decoded * round_s
        if not self._search_backlog.idle:
            work_s += self._searches_s(tokens + decoded)
        return _NewWork(key.steps, work_s * self._caution + self._answer_s, read_s, more)

    def _pushed_s(self, new: _NewWork, now_s: float, share: float) -> Iterator[float]:
        """How late others would be at worst, for each lane where some might be."""
        begin_s, read_s = now_s + self._answer_s, self._decode_backlog.prefill_s + new.read_s
        more_fixed_s, more_each_s = new.more
        alone = not new.calls and self._search_backlog.idle
        for busy in self._decode_backlog.busy.values():
            lane, urgent = busy.lane, busy.lane.urgent
            running = [job for job in busy.occupants if job.ends_s < math.inf]
            if not urgent and not running:
                continue
            steps, length = lane.key.steps, busy.length
            fixed_s, each_s = self._decode_backlog.round(steps)
            token_s = fixed_s + each_s * length
            after_s = token_s
            if more_fixed_s or more_each_s:  # not if all slots are taken
                token_ratio = self._decode_backlog.token_ratio(steps, new.steps)
                after_s += token_ratio * (more_fixed_s + more_each_s * length)
            # Of the most urgent, the first has the least time and the last the most tokens.
            tokens, ends_s = 0, math.inf
            for job in (*running, urgent[0], urgent[-1]) if urgent else running:
                if job.tokens_left > tokens:
                    tokens = job.tokens_left
                if job.ends_s < ends_s:
                    ends_s = job.ends_s
            searches_s = 0.0 if alone else self._searches_s(tokens, new)
            least_s = share * (ends_s - begin_s)
            if (read_s + tokens * after_s + searches_s) * self._caution > least_s:
                yield self._late_in_lane_s(busy, running, new, (token_s, after_s), begin_s, share)
        if not self._search_backlog.idle:
            yield from self._searches_pushed_s(new, begin_s, share)

    def _late_in_lane_s(
        self,
        busy: BusyLane,
        running: list[Job],
        new: _NewWork,
        token_s: tuple[float, float],
        begin_s: float,
        share: float,
    ) -> float:
        """The same for one lane; `token_s`: a token without and with the new generations."""
        caution, prefill_s = self._caution, self._decode_backlog.prefill_s
        read_s = prefill_s + new.read_s

        def late_s(job: Job) -> float:
            searches_s = self._searches_s(job.tokens_left, new)
            work_s = read_s + job.tokens_left * token_s[1] + searches_s
            return caution * work_s - share * (job.ends_s - begin_s)

        def before_s(job: Job) -> float:
            work_s = prefill_s + job.tokens_left * token_s[0] + self._searches_s(job.tokens_left)
            return caution * work_s - (job.ends_s - begin_s)

        if max(map(late_s, running + busy.lane.urgent)) <= 0:
            return 0.0
        jobs = running + busy.lane.next_due
        return max((late_s(job) for job in jobs if before_s(job) <= 0), default=0.0)

    def _searches_pushed_s(self, new: _NewWork, begin_s: float, share: float) -> Iterator[float]:
        """How late each search would be that has a deadline and would be in time without these."""
        more_s = new.more[0] / self._decode_backlog.calls
        for due in self._search_backlog.due():
            calls, seconds = due.until
            before_s = self._caution * (seconds + self._beside_search_s(due.lane, calls))
            if before_s <= due.ends_s - begin_s:
                with_s = min(calls, new.calls) * new.each_s + calls * more_s + new.read_s
                yield before_s + self._caution * with_s - share * (due.ends_s - begin_s)

    def _decoded_tokens(self, size: GenerationSize) -> int:
        """Tokens to decode, one after another; the first of each comes from its prefill."""
        return -(-size.jobs // self._max_rows) * (size.tokens - 1)

    def _prompts_s(self, key: LaneKey, size: GenerationSize) -> float:
        return self._costs.prompts_s(key, size.jobs * size.prompt, size.jobs)

    # Beside searches.

    def _searched_s(self, key: LaneKey, size: GenerationSize) -> float:
        """The time of all calls of one search."""
        return self._costs.search_s(key, size.prompt, size.tokens, size.beams)

    def _searches_s(self, tokens: float, new: _NewWork | None = None) -> float:
        """The time of searches while this many tokens are decoded, new searches included."""
        seconds = 0.0
        if not self._search_backlog.idle:
            seconds = self._search_backlog.seconds(tokens * self._decode_backlog.calls)
        if new is not None and new.calls:
            seconds += min(new.calls, tokens * self._decode_backlog.calls) * new.each_s
        return seconds

    def _beside_search_s(self, key: LaneKey, calls: float) -> float:
        """The time of everything but this lane of searches during this many of its calls."""
        others_s = self._search_backlog.seconds(calls, but=key) + calls * self._beside_s
        return others_s + self._decode_backlog.prefill_s + self._decode_backlog.seconds(calls)


def _length(size: GenerationSize) -> int:
    """The length of each, on average over its tokens."""
    return size.prompt + size.tokens // 2


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


class Backlog:
    """Everything that waits and runs, in seconds: which requests may queue, and at how many steps.

    Admission, deadlines, load shedding and Retry-After ask it. Call with the engine's lock held.
    """

    def __init__(self, common: Common) -> None:
        self._common = common
        self._limits, self._jobs = common.limits, common.jobs
        self._retry_after = RetryAfter(common.limits.queue_requests)
        self._busy_until_s = 0.0
        self.unread: Unread = NothingUnread()

    def begin(self, call: Call, now_s: float) -> None:
        """A call begins."""
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
        if jobs[0].admitted:
            return
        model_backlog = None
        if jobs[0].lane.kind != "classify":
            model_backlog = self.of_model(self._common.models[jobs[0].lane.model])
        for job in jobs:
            if job.deadline is None:
                continue
            if model_backlog is None:
                self._check_classified(job, job.deadline, now_s)
            else:
                size = GenerationSize(job.lengths[0], job.tokens_left, len(jobs), job.beams)
                self._check_written(model_backlog, job.lane, size, job.deadline, now_s)
        self._check_wait(now_s, len(jobs), jobs[0].deadline)

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
        lane = self._classify_lane(key)
        if lane is None:
            return
        late_s = lane.least_late_s(least, deadline.ends_s, max(now_s, self._busy_until_s))
        if late_s > 0 and lane.idle_s(least, most) <= deadline.given_s:
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
        steps = self._steps_for(key, choices, size, deadline, now_s)
        self._check_places(now_s, size.jobs)
        self._check_wait(now_s, size.jobs, deadline)
        return steps

    def _steps_for(
        self,
        key: LaneKey,
        choices: Sequence[int],
        size: GenerationSize,
        deadline: Deadline | None,
        now_s: float,
    ) -> int:
        model = self._common.models[key.model]
        model_backlog = self.of_model(model)
        if deadline is None:
            share = model.shedder.share(model_backlog.wait_s(key._replace(steps=choices[-1])))
            fitting = [steps for steps in choices if steps <= share * choices[-1]]
            return fitting[-1] if fitting else choices[0]
        busy = not self._jobs.idle
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
        # They are taken to be like the requests that wait.
        each_s = self.waiting_s() / max(1, self._jobs.queued)
        return self._retry_after.turn_s(now_s, self.wait_s(now_s), each_s, jobs)

    def _check_places(self, now_s: float, jobs: int) -> None:
        queued = self._jobs.queued + self.unread.waiting
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
            self._refuse(deadline, least, idle_s, late_s, now_s)

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
            self._refuse(deadline, key.steps, model_backlog.idle_s(key, size), late_s, now_s)

    def _refuse(
        self, deadline: Deadline, steps: int, idle_s: float, late_s: float, now_s: float
    ) -> None:
        idle = self._jobs.idle
        # On the network, in the queue for parsing, and while it was parsed.
        spent_s = max(0.0, now_s - deadline.arrived_s - _USUAL_S)
        if idle:
            if not spent_s:
                self._common.lower_caution()
            idle_s = max(idle_s, deadline.given_s + late_s - spent_s)
        if idle_s > deadline.given_s:
            raise ImpossibleDeadline(deadline.given_s, idle_s, steps)
        if idle or deadline.ends_s <= now_s:
            raise DeadlineLapsed(deadline.given_s)
        raise _too_busy(late_s)

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

    def of_model(self, model: LoadedModel) -> ModelBacklog:
        """The backlog of one model that generates, as it is now."""
        return ModelBacklog(
            model.cost,
            self._common.answer.seconds,
            [lane for lane in model.cached if isinstance(lane, GenerateLane)],
            [lane for lane in model.cached if isinstance(lane, SearchLane)],
            self._limits.decode_rows,
            sum([one.busy_s() for one in self._common.models.values() if one is not model]),
            model.sharing == "shared",
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


def _too_busy(late_s: float) -> TooBusy:
    return TooBusy(
        f"behind what waits, the answer may come {late_s * 1000:.0f} ms after deadline_ms: "
        "try again later, or give it more time",
        retry_after_s=late_s,
    )
