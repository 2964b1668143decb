"""Generation: the queue and the running batch of each rung of a model, prefill and decoding.

The life of a generation, whose rows join and leave the batch between two tokens only:

    waiting -> prefilling -> row of the batch -> ended
                   ^                |
                   +-- requeued <---+   its cache is full: its last tokens go on
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from serve.engine.cost import CostKey
from serve.engine.job import (
    CallKind,
    Deliveries,
    Event,
    FailedEvent,
    Job,
    LaneKey,
    State,
    Waiting,
)
from serve.engine.loaded import Call, EngineModel
from serve.engine.writing import Generation, accept_tokens, generation_of
from serve.metrics import Metrics
from serve.runtime import Batches, DecodeBatch, Prefill, Speculation
from serve.runtime.protocol import MOST_AHEAD, FloatArray, IntArray

# How far a row that is alone runs ahead is tried while it is in use.
_TRIAL = 64  # tokens that each lead is tried for
_SETTLING = 16  # of them, not counted: switching has a cost of its own
_CHOSEN = 1024  # tokens with the best lead between two rounds,
_PATIENCE = 8  # or at most this many times as many, where the others are far behind,
_LOSS = 0.002  # so that trials cost this share of all time
_ROUNDS, _FEW = 9, 3  # the choice is made from so many; while few are known the next comes sooner
_WORTH = 0.08  # the share that running ahead must gain over plain decoding


def leads_of(steps: int) -> tuple[int, ...]:
    """The leads worth a trial, in steps before a draft; 0 is no speculation.

    With fewer positions under way, a position takes more steps before it drafts.
    """
    most_under_way = (MOST_AHEAD, MOST_AHEAD // 2)
    return (0, *sorted({-(-steps // most) for most in most_under_way})) if steps > 1 else (0,)


class LeadTuner:
    """Finds the fastest of several leads while they are in use.

    Now and then all leads are tried one right after the other, since other load on the machine
    changes times more than the leads differ. In between, the lead that was fastest in most of the
    last rounds is used. The more a round costs, the later the next one comes.
    """

    def __init__(self, leads: tuple[int, ...]) -> None:
        self.best = leads[0]
        self._leads = leads
        self._rounds: deque[dict[int, float]] = deque(maxlen=_ROUNDS)
        self._round: dict[int, float] = {}  # seconds of each trial
        self._tokens = 0  # with the present lead
        self._spent_s = 0.0
        self._until_next = 0.0  # tokens until the next round

    @property
    def lead(self) -> int:
        """The lead to use now."""
        return self.best if self._all_tried else self._leads[len(self._round)]

    def observe(self, seconds: float) -> None:
        """A token was decoded with the present lead in this time."""
        self._tokens += 1
        if self._all_tried:
            if self._tokens >= self._until_next:
                self._round, self._tokens = {}, 0
            return
        if self._tokens > _SETTLING:
            self._spent_s += seconds
        if self._tokens == _TRIAL:
            self._round[self.lead] = self._spent_s
            self._tokens, self._spent_s = 0, 0.0
            if len(self._round) == len(self._leads):
                self._choose()

    @property
    def _all_tried(self) -> bool:
        return len(self._round) == len(self._leads)

    def _choose(self) -> None:
        mean_s = sum(self._round.values()) / len(self._leads)
        self._rounds.append({lead: seconds / mean_s for lead, seconds in self._round.items()})
        shares = {lead: median(one[lead] for one in self._rounds) for lead in self._leads}
        fastest = min(shares, key=shares.__getitem__)
        worth = shares[fastest] < (1 - _WORTH) * shares[self._leads[0]]
        self.best = fastest if worth else self._leads[0]
        self._until_next = _CHOSEN * len(self._rounds) / _FEW
        if len(self._rounds) >= _FEW:
            lost = _TRIAL * sum(share / shares[fastest] - 1 for share in shares.values())
            most = _PATIENCE * self._until_next
            self._until_next = max(self._until_next, min(lost / _LOSS, most))


class GenerateLane:
    """One rung's generations: those that wait, the one in prefill, and the rows of the batch.

    A row of the batch is its job: `rows` are in the order of the batch and change only together
    with it, on the engine's thread.
    """

    def __init__(self, key: LaneKey, calls_a_token: int, batches: Batches) -> None:
        self.key = key
        self.calls_a_token = calls_a_token
        self.waiting = Waiting()
        self.requeued: list[Job] = []  # to be prefilled again
        self.read_again = False  # whether one of those was read last
        self.prefilling: Job | None = None
        self.prefill: Prefill | None = None  # its own
        self.ready = False  # whether that is done: the job joins before the next token
        self.rows: list[Job] = []
        self.batch: DecodeBatch | None = None
        self.speculation: Speculation | None = None  # of the only row
        self.leads = LeadTuner(leads_of(key.steps))
        self.calls = 0  # made for the present token
        self.due = 0.0  # the call from which the lane may take part again
        self.begun_s = 0.0  # when the present token was begun
        self.prefill_s = 0.0  # spent on the present prefill
        self.stepped = key.steps  # of a row in its last whole token, those of drafts included
        self._batches = batches
        self._most_rows = 0  # since the lane was last empty

    def busy(self) -> Sequence[CallKind]:
        kinds: list[CallKind] = ["decode"] if self.rows else []
        if (self.prefilling is not None and not self.ready) or self.requeued or self.waiting:
            kinds.append("prefill")
        return kinds

    @property
    def nbytes(self) -> int:
        held = [self.batch, self.prefill]  # either may leave meanwhile, on the engine's thread
        return sum([one.nbytes for one in held if one is not None])

    @property
    def idle(self) -> bool:
        """Whether there is nothing to decode, now or after the next call."""
        return not self.rows and not self.ready

    @property
    def unread(self) -> Job | None:
        """The job whose prompt is being prefilled."""
        return None if self.ready else self.prefilling

    def occupants(self) -> Sequence[Job]:
        one = [] if self.prefilling is None else [self.prefilling]
        return [*self.rows, *one, *self.requeued]

    # The queue. With the engine's lock held.

    def add(self, job: Job) -> None:
        self.waiting.add(job)

    def drop(self, job: Job) -> None:
        if job.state is State.QUEUED:
            self.waiting.take(job)

    def sweep(self) -> None:
        job = self.prefilling
        if job is not None and job.state is State.ENDED:
            self.prefilling, self.prefill, self.ready = None, None, False
        self.requeued = [job for job in self.requeued if job.state is not State.ENDED]
        if self.rows and all(job.state is State.ENDED for job in self.rows):
            if self.calls:  # rows cannot leave before their token is whole
                self.drop_batch()
                return
            try:
                self.leave(list(self.rows))
            except Exception:  # the memory may be full; no job is left that this could fail
                self.drop_batch()

    def read(self, job: Job) -> None:
        """Begin the job's prefill. One at a time, so that one prompt's memory is enough."""
        assert self.prefilling is None
        most = self._most_rows if self.occupants() else 0
        self.prefilling, self.prefill_s = job, 0.0
        self._most_rows = max(most, len(self.occupants()))

    def prefilled(self, full: bool) -> None:
        """The prefill is done: the job joins before the next token, unless its cache is full."""
        job = self.prefilling
        assert job is not None
        if full:
            self.prefilling = self.prefill = None
            self.requeued.append(job)
        else:
            self.ready = True

    def charged_bytes(self, extra: Job | None = None) -> int:
        """All rows are as long as the longest, and buffers keep the size they once had. A prompt is
        prefilled beside the batch and then copied into it.
        """
        inside, batch = self.occupants(), self.batch
        held_bytes = 0 if batch is None else batch.nbytes
        jobs = inside if extra is None else [*inside, extra]
        if not jobs:
            return held_bytes
        rows = max(self._most_rows if inside else 0, len(jobs))
        positions = max(job.positions for job in jobs)
        beside = self._batches.bytes_for(positions, 1) if rows > 1 else 0
        return max(held_bytes, self._batches.bytes_for(positions, rows)) + beside

    # The batch.

    def next_rows(self) -> tuple[Job, ...]:
        """The rows of the next token: those that leave have left, and the job that is ready joins.

        A row whose job has ended leaves between two tokens.
        """
        if self.calls:
            return tuple(self.rows)
        rows = [job for job in self.rows if job.state is not State.ENDED]
        if self.ready and self.prefilling is not None:
            rows.append(self.prefilling)
        return tuple(rows)

    def token(self) -> "DecodePart":
        """A whole token for every row."""
        return DecodePart(self, self.next_rows())

    def part(self) -> "DecodePart":
        """The next call of the token that is under way, or the first call of the next one."""
        begins, rows = self.calls == 0, self.next_rows()
        self.calls = (self.calls + 1) % self.calls_a_token
        return DecodePart(self, rows, begins, ends=self.calls == 0)

    def open(self) -> DecodeBatch:
        """The batch of the rows."""
        if self.batch is None:
            self.batch = self._batches.open_batch()
        return self.batch

    def settle(self, jobs: tuple[Job, ...]) -> None:
        """Let rows leave and join, so that these are the rows of the next token."""
        if tuple(self.rows) == jobs:
            return
        self.leave([job for job in self.rows if job not in jobs])
        if self.ready and self.prefilling in jobs:
            assert self.prefilling is not None and self.prefill is not None
            self.speculation = None
            self.open().join(self.prefill)
            self.rows.append(self.prefilling)
            self.prefilling, self.prefill, self.ready = None, None, False

    def leave(self, jobs: Sequence[Job]) -> None:
        """Remove the rows of these jobs; the last row takes the place of each."""
        if not jobs:
            return
        assert self.batch is not None
        self.speculation = None
        row = 0
        while row < len(self.rows):
            if self.rows[row] in jobs:
                self.batch.remove(row)
                self.rows[row] = self.rows[-1]
                self.rows.pop()
            else:
                row += 1
        if not self.rows:
            self.batch = None

    def drop_batch(self) -> None:
        """The batch is lost, whatever its state. All its jobs have ended."""
        self.rows.clear()
        self.batch = self.speculation = None
        self.calls = 0


class DecodePart(NamedTuple):
    """A lane's part of a decode call.

    Rows change only between two tokens. A part that neither begins nor ends a token is a step
    between.
    """

    lane: GenerateLane
    jobs: tuple[Job, ...]  # all rows; those that join come last
    begins: bool = True
    ends: bool = True

    @property
    def whole(self) -> bool:
        """Whether it is a whole token."""
        return self.begins and self.ends


class Decoded(NamedTuple):
    """What one decode call has given."""

    begun_s: float
    ran_s: float
    failed: dict[GenerateLane, Exception]  # lanes whose batch is lost
    longest: int  # cached positions of a row of the first part
    events: list[tuple[Job, Event]]  # of lanes whose token ends
    lost: dict[GenerateLane, Exception]  # lanes whose batch was lost behind that token


class Prefilled(NamedTuple):
    """What one prefill call has given."""

    begun_s: float
    ran_s: float
    positions: int
    length: int  # of what was read
    events: list[tuple[Job, Event]] | None  # after the last piece, the first token


class Prefilling:
    """The prefill of one model's prompts, piece by piece, its rungs in turn."""

    def __init__(self, model: EngineModel, lanes: Mapping[LaneKey, GenerateLane]) -> None:
        self.model = model
        self._lanes = lanes
        self._turns: deque[LaneKey] = deque()

    def plan(self, now_s: float) -> Call | None:
        self._turns.extend([key for key in self._lanes if key not in self._turns])
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            lane = self._lanes[self._turns[-1]]
            if lane.prefilling is None:
                new = bool(lane.waiting) and self.model.common.may_enter(lane)
                # Many long rows are read again all the time: new ones have every second turn.
                if lane.requeued and not (new and lane.read_again):
                    lane.read(lane.requeued.pop(0))
                    lane.read_again = True
                elif new:
                    job = lane.waiting.take(lane.waiting[0])
                    self.model.common.jobs.start(job, now_s)
                    lane.read(job)
                    lane.read_again = False
            if lane.unread is not None:
                return Call(self, lane.key, "prefill", (lane.unread,))
        return None

    def run(self, call: Call) -> Prefilled:
        lane, (job,) = self._lanes[call.lane], call.jobs
        begun_s = self.model.common.clock()
        if lane.prefill is None:
            tokens = np.array(generation_of(job).prompt, np.int64)
            lane.prefill = lane.open().read(tokens, job.positions)
        logits = lane.prefill.advance()  # (V,)
        ran_s = self.model.common.clock()
        positions = lane.prefill.positions
        # The source of a translation has no positions.
        length = max(positions, len(generation_of(job).prompt))
        events = None if logits is None else accept_tokens([job], logits[None])
        return Prefilled(begun_s, ran_s, positions, length, events)

    def apply(self, call: Call, result: Prefilled | Exception) -> Deliveries:
        model, lane, (job,) = self.model, self._lanes[call.lane], call.jobs
        if isinstance(result, Exception):
            return model.fail(lane.key, call.jobs, result)
        begun_s, ran_s, positions, length, events = result
        model.cost.observe_usual((lane.key, "prefill"), ran_s - begun_s)
        model.threw = None
        lane.prefill_s += ran_s - begun_s
        if events is None:
            return []
        model.cost.observe(CostKey("prefill", lane.key.steps), 1, length, lane.prefill_s)
        model.count_call(lane.key, "prefill", 1)
        lane.prefilled(full=positions >= generation_of(job).request.window)
        return take_in(model, events, ran_s)

    def usual_s(self, call: Call) -> list[float | None]:
        (job,) = call.jobs
        key, cost = call.lane, self.model.cost
        predicted = cost.call_s(CostKey("prefill", key.steps), 1, job.lengths[0])
        return [cost.usual_s((key, "prefill")), predicted]


# How the rungs of one model share the machine: they share calls of the one-step graph, or where
# that is not possible they alternate, a token each. A row of M steps needs M calls for a token.
# Equal turns would make many steps slow; a token for each row in turn would make few steps wait for
# many. So a rung of M steps gets tokens about sqrt(L / M) times as often as the longest rung, of L
# steps. Where a shared call has room left, other rungs join it.


class Decoding:
    """The decoding of one model: which of its rungs take part in the next call, and that call.

    Each rung is due again after as many calls as its share allows.
    """

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.lanes: dict[LaneKey, GenerateLane] = {}
        mix = model.runtime.mix()
        self._mix = mix
        self.most_lanes = 1 if mix is None else mix.most_batches  # that may share a call
        model.shares_calls = self.most_lanes > 1
        self._calls = 0.0
        self._active: list[GenerateLane] = []

    def open(self, key: LaneKey) -> GenerateLane:
        """Open the lane of a rung."""
        calls = key.steps if self.most_lanes > 1 else 1
        lane = GenerateLane(key, calls, self.model.batches(key.steps))
        self.lanes[key] = lane
        return lane

    # Plan.

    def plan(self, now_s: float) -> Call | None:
        lanes = [lane for lane in self.lanes.values() if not lane.idle]
        self._activate(lanes)
        if not lanes:
            return None
        parts = self._parts(lanes)
        jobs = [job for part in parts for job in part.jobs]
        return Call(self, parts[0].lane.key, "decode", jobs, parts)

    def _parts(self, lanes: list[GenerateLane]) -> list[DecodePart]:
        """The next call: a whole token for one lane, or parts of several."""
        if len(lanes) == 1 and lanes[0].calls == 0:
            return [lanes[0].token()]
        longest = max(lane.calls_a_token for lane in lanes)
        chosen = self._fitting(lanes, self.model.common.limits.decode_rows)
        if self.most_lanes == 1:
            chosen[0].due += 1
            return [chosen[0].token()]
        # Calls that it got because there was room do not count against a lane: none gets further
        # ahead than a token of the longest rung.
        latest = lanes[0].due + longest
        for lane in chosen:
            lane.due = min(lane.due + 1 / _share(lane.calls_a_token, longest), latest)
        self._calls += 1
        return [lane.part() for lane in chosen]

    def _activate(self, lanes: list[GenerateLane]) -> None:
        """Lanes that became busy are due now, like the others."""
        if lanes == self._active:
            return
        here = [lane for lane in lanes if lane in self._active]
        now = min((lane.due for lane in here), default=self._calls)
        for lane in lanes:
            if lane not in here:
                lane.due = min(now, self._calls)
        self._active = list(lanes)

    def _fitting(self, lanes: list[GenerateLane], most_rows: int) -> list[GenerateLane]:
        """Lanes that fit into one call, most overdue first; at least one."""
        lanes.sort(key=lambda lane: lane.due)
        self._calls = max(self._calls, lanes[0].due)
        chosen: list[GenerateLane] = []
        rows = 0
        for lane in lanes:
            more = len(lane.rows) + lane.ready
            if not chosen or (rows + more <= most_rows and len(chosen) < self.most_lanes):
                chosen.append(lane)
                rows += more
        return chosen

    # Run.

    def run(self, call: Call) -> Decoded:
        begun_s = self.model.common.clock()
        failed: dict[GenerateLane, Exception] = {}
        parts: list[DecodePart] = []
        for part in call.what:
            try:
                part.lane.settle(part.jobs)
                # Where rows have left, others have taken their places.
                parts.append(part._replace(jobs=tuple(part.lane.rows)))
            except Exception as error:
                failed[part.lane] = error
        found: dict[GenerateLane, FloatArray] = {}
        try:
            found = self._compute(parts) if parts else {}
        except Exception as error:
            failed |= {part.lane: error for part in parts}
            parts = []
        ran_s = self.model.common.clock()
        longest = max(parts[0].lane.open().lengths) if parts else 0
        for part in parts:
            if part.begins:
                part.lane.begun_s = begun_s
        events, lost = self._end_token([part for part in parts if part.ends], found)
        return Decoded(begun_s, ran_s, failed, longest, events, lost)

    def _compute(self, parts: Sequence[DecodePart]) -> dict[GenerateLane, FloatArray]:
        """Logits (B, V) of lanes whose token ends."""
        if len(parts) == 1 and parts[0].whole:
            return {parts[0].lane: self._token(parts[0])}
        tokens = {part.lane: _last_tokens(part) for part in parts if part.begins}
        for lane in tokens:
            lane.speculation = None
        mix = self._mix
        assert mix is not None, "lanes that do not go step by step"
        if tokens:
            mix.begin([lane.open() for lane in tokens], list(tokens.values()))
        mix.advance([part.lane.open() for part in parts])
        ending = [part.lane for part in parts if part.ends]
        logits = mix.end([lane.open() for lane in ending]) if ending else []
        return dict(zip(ending, logits, strict=True))

    def _token(self, part: DecodePart) -> FloatArray:
        """Logits (B, V) after the last tokens of all rows; a row that is alone may speculate."""
        lane = part.lane
        lane.stepped = lane.key.steps
        if self._may_speculate(part) and (lead := lane.leads.lead):
            return self._speculate(lane, generation_of(part.jobs[0]), lead)
        lane.speculation = None
        return lane.open().step(_last_tokens(part))

    def _may_speculate(self, part: DecodePart) -> bool:
        allowed = self.model.common.limits.speculate and part.lane.key.steps > 1
        return allowed and len(part.jobs) == 1 and self._mix is not None and self._mix.can_speculate

    def _speculate(self, lane: GenerateLane, work: Generation, lead: int) -> FloatArray:
        """Logits (1, V) after the row's last token, which may be under way already."""
        speculation = lane.speculation
        if speculation is None or speculation.lead != lead:
            assert self._mix is not None
            speculation = lane.speculation = self._mix.speculation(lane.open(), lead)
        begun = speculation.tokens[:1]
        drafted_right = begun == [work.last_token]
        if begun:
            self.model.common.metrics.accepted.labels(lane.key.name).inc(drafted_right)
        if not drafted_right:
            speculation.keep(0)
            speculation.begin(work.last_token)
        lane.stepped = 0
        while True:
            lane.stepped += len(speculation.tokens)
            output = speculation.advance()
            if output.drafts is not None:
                self._draft(lane, work, output.drafts, done=output.last is not None)
            if output.last is not None:
                return output.last[None]

    def _draft(self, lane: GenerateLane, work: Generation, logits: FloatArray, done: bool) -> None:
        """Begin the first position whose draft, from logits (P, V), is new or has changed."""
        speculation = lane.speculation
        assert speculation is not None
        begun = speculation.tokens
        for behind, token in enumerate(work.drafts(logits, ahead=done), start=1):
            if begun[behind : behind + 1] != [token]:
                speculation.keep(behind)
                if speculation.room > 0:
                    speculation.begin(token)
                    self.model.common.metrics.drafted.labels(lane.key.name).inc()
                return

    def _end_token(
        self, parts: Sequence[DecodePart], found: Mapping[GenerateLane, FloatArray]
    ) -> tuple[list[tuple[Job, Event]], dict[GenerateLane, Exception]]:
        """Choose a token for each job from its logits (B, V); rows that are over leave.

        Also the lanes whose batch was lost when a row left it: the memory may be full.
        """
        lost: dict[GenerateLane, Exception] = {}
        if not parts:
            return [], lost
        logits = [found[part.lane] for part in parts]
        jobs = [job for part in parts for job in part.jobs]
        events = accept_tokens(jobs, logits[0] if len(logits) == 1 else np.concatenate(logits))
        failed = {job for job, event in events if isinstance(event, FailedEvent)}
        for part in parts:
            lane, over = part.lane, []
            for job, length in zip(part.jobs, lane.open().lengths, strict=True):
                work = generation_of(job)
                if job.state is State.ENDED or job in failed or work.finish_reason is not None:
                    over.append(job)
                elif length >= work.request.window:
                    lane.requeued.append(job)
                    over.append(job)
            try:
                lane.leave(over)
            except Exception as error:
                lost[lane] = error
        return events, lost

    # Apply.

    def apply(self, call: Call, result: Decoded | Exception) -> Deliveries:
        assert isinstance(result, Decoded), "run catches what the runtime throws"
        model, planned = self.model, call.what
        begun_s, ran_s, failed, longest, events, lost = result
        parts = [part for part in planned if part.lane not in failed]
        single = len(planned) == len(parts) == 1 and parts[0].whole
        if parts:
            model.threw = None
            self._count(parts)
        deliveries: Deliveries = []
        for others, (lane, error) in enumerate(failed.items()):
            # The caches of its batch may be in any state, so all its jobs end.
            jobs = [job for part in planned if part.lane is lane for job in part.jobs]
            deliveries += model.fail(lane.key, jobs, error, counted=others > 0)
            lane.drop_batch()
        for part in parts:
            if part.ends:
                model.cost.observe_usual((part.lane.key, "decode"), ran_s - part.lane.begun_s)
        deliveries += take_in(model, events, ran_s)
        # With the tokens that they had.
        for others, (lane, error) in enumerate(lost.items(), len(failed)):
            kept = lane.requeued  # they are read again
            rows = [job for job in lane.rows if job.state is not State.ENDED and job not in kept]
            deliveries += model.fail(lane.key, rows, error, counted=others > 0)
            lane.drop_batch()
        if single:  # in a shared call others would make it seem slower
            # Including what follows the call, since the next call waits for that too.
            (part,), spent_s = parts, model.common.clock() - begun_s
            cost_key = CostKey("decode", part.lane.key.steps)
            model.cost.observe(cost_key, len(part.jobs), longest, spent_s)
            if self._may_speculate(part):
                part.lane.leads.observe(spent_s)
        return deliveries

    def usual_s(self, call: Call) -> list[float | None]:
        cost, known = self.model.cost, []
        for part in call.what:
            key, length = part.lane.key, max(job.positions for job in part.jobs)
            known.append(cost.usual_s((key, "decode")))
            known.append(cost.call_s(CostKey("decode", key.steps), len(part.jobs), length))
        return known

    def _count(self, parts: Sequence[DecodePart]) -> None:
        metrics = self.model.common.metrics
        rows = sum(len(part.jobs) for part in parts)
        metrics.batch_rows.labels(self.model.name, "decode").observe(rows)
        for part in parts:
            key = part.lane.key
            steps = part.lane.stepped if part.whole else 1
            metrics.decoded(key, len(part.jobs), steps, self.model.nfe(key.steps))


def take_in(model: EngineModel, events: Sequence[tuple[Job, Event]], now_s: float) -> Deliveries:
    """Deliver tokens and end jobs."""
    deliveries: Deliveries = []
    written: list[Job] = []
    for job, event in events:
        if job.state is State.ENDED:
            continue  # the client disconnected during the call
        if isinstance(event, FailedEvent):
            model.end(job, event, deliveries)
            continue
        written.append(job)
        work = generation_of(job)
        if work.request.stream:
            deliveries.append((work.deliver, event))
        if work.finish_reason is not None:
            model.end(job, work.finished(job.span(now_s)), deliveries)
    count_tokens(model.common.metrics, written, now_s)
    return deliveries


def _last_tokens(part: DecodePart) -> IntArray:
    """The input token of each row (B,)."""
    return np.array([generation_of(job).last_token for job in part.jobs], np.int64)


def _share(calls: int, longest: int) -> float:
    """The share of shared calls in which rows of this many calls a token take part.

    Rounded up to whole tokens, so that rungs meet at the same steps again.
    """
    tokens = min(math.ceil(math.sqrt(longest / calls)), longest // calls)
    return tokens * calls / longest


def count_tokens(metrics: Metrics, jobs: Iterable[Job], now_s: float) -> None:
    """Count one more token of each job, once for all rows that are alike."""
    # Rows by lane and time of their last token; None for the first token.
    rows: Counter[tuple[LaneKey, float | None]] = Counter()
    for job in jobs:
        work = generation_of(job)
        rows[job.lane, work.last_token_s] += 1
        if work.last_token_s is None:
            assert job.started_s is not None
            labels = job.lane.name, str(job.lane.steps)
            job.first_token_s = now_s
            metrics.queue_seconds.labels(*labels).observe(job.started_s - job.queued_s)
            metrics.first_token_seconds.labels(*labels).observe(now_s - job.queued_s)
        work.last_token_s = now_s
        job.tokens_left -= 1
    for (lane, since_s), count in rows.items():
        metrics.tokens.labels(lane.name).inc(count)
        if since_s is not None:
            between = metrics.inter_token_seconds.labels(lane.name, str(lane.steps))
            between.observe_all(now_s - since_s, count)
