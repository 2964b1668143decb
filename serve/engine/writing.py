"""Carries out the calls of generations: reads prompts, takes rows from token to token.

Used by the engine's thread alone, and takes the engine's lock only while it touches the scheduler.
It deliberately knows neither when to run nor who is told: it returns the events that came of it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serve.engine.choosing import accept_tokens
from serve.engine.ending import Ending, span
from serve.engine.events import Event, FailedEvent
from serve.engine.generation import Generation
from serve.engine.pace import CallTimes
from serve.engine.runner import Runner, Stretch
from serve.engine.ways import Ways, worth
from serve.engine.work import Deliveries, Work, work_as
from serve.engine.written import Written
from serve.metrics import Metrics
from serve.runtime import Outcome, Wave
from serve.runtime.protocol import FloatArray
from serve.scheduler.job import DecodeCall, DecodePart, Job, LaneKey, PrefillCall, State
from serve.scheduler.latency_model import LatencyModel, Series
from serve.scheduler.scheduler import Scheduler

Part = DecodePart[Work]


class Writing:
    """The part of the engine that writes texts."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        runner: Runner,
        lock: threading.Condition,
        ending: Ending,
        times: CallTimes,
        latency: LatencyModel,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._ending = ending
        self._times = times
        self._latency = latency
        self._metrics = metrics
        self._clock = clock
        self._begun_s: dict[LaneKey, float] = {}  # when the present token was begun
        self._reading_s: dict[LaneKey, tuple[int, float]] = {}  # of the job of this number
        self._ways = Ways()

    def drop_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._begun_s = {key: one for key, one in self._begun_s.items() if key.model != model}
        for key in [key for key in self._reading_s if key.model == model]:
            del self._reading_s[key]
        self._ways.drop_model(model)

    def prefill(self, call: PrefillCall[Work]) -> Deliveries:
        """Read a piece of a prompt; its last piece gives the first token."""
        self._runner.forget(call.over)
        if call.job is None:
            return []
        lane, job, work = call.lane, call.job, work_as(Generation, call.job)
        begun_s = self._clock()
        try:
            logits = self._runner.read(lane, job.number, work.prompt, job.positions)  # (V,)
        except Exception as error:
            deliveries = self._ending.fail(lane, [job], error)
            self._forget(lane)
            return deliveries
        now_s = self._clock()
        self._times.observe((lane, "prefill"), now_s - begun_s)
        self._ending.ran(lane)
        number, spent_s = self._reading_s.get(lane, (job.number, 0.0))
        spent_s = now_s - begun_s + (spent_s if number == job.number else 0.0)
        self._reading_s[lane] = job.number, spent_s
        if logits is None:
            return []
        del self._reading_s[lane]
        positions = self._runner.positions_read(job.number)
        length = max(positions, len(work.prompt))  # a source is not among the positions
        self._latency.observe(Series(lane.model, "prefill", lane.steps), 1, length, spent_s)
        self._metrics.call(lane, "prefill", 1, None)
        events = accept_tokens([job], logits[None])
        with self._lock:
            if job.state is not State.ENDED:
                self._scheduler.has_read(job, full=positions >= work.wish.window)
            deliveries = self._take_in(events, now_s)
        self._forget(lane)
        return deliveries

    def decode(self, call: DecodeCall[Work]) -> Deliveries:
        """One call for the rows of some lanes; those that end a token get it."""
        begun_s = self._clock()
        deliveries: Deliveries = []
        parts = [part for part in call.parts if self._prepare(part, deliveries) and part.jobs]
        if not parts:
            return deliveries
        single = len(parts) == 1 and parts[0].whole
        try:
            found = self._run(parts, single, call.abreast)
        except Exception as error:
            found = dict.fromkeys((part.lane for part in parts), error)
        now_s = self._clock()
        errors = {lane: one for lane, one in found.items() if isinstance(one, Exception)}
        parts = [part for part in parts if part.lane not in errors]
        if parts:
            done = self._count(parts, single)
            if call.contended and not errors:
                self._compare(call.lane, done, now_s - begun_s)
            self._ending.ran(parts[0].lane)
        for lane, one in errors.items():
            deliveries += self._lose(lane, one)
        if not parts:
            return deliveries
        longest = max(self._runner.lengths(parts[0].lane)) if single else 0
        for part in parts:
            if part.begins:
                self._begun_s[part.lane] = begun_s
            if part.ends:
                self._times.observe((part.lane, "decode"), now_s - self._begun_s[part.lane])
        deliveries += self._end_token([part for part in parts if part.ends], found, now_s)
        if single:  # others in the call would make it seem slower than the machine is
            # With what follows the call: the next one waits for that too.
            lane, jobs, spent_s = parts[0].lane, parts[0].jobs, self._clock() - begun_s
            series = Series(lane.model, "decode", lane.steps)
            self._latency.observe(series, len(jobs), longest, spent_s)
            if self._may_run_ahead(lane, jobs):
                self._ways.leads(lane).observe(1, spent_s)
        return deliveries

    def _prepare(self, part: Part, deliveries: Deliveries) -> bool:
        """Let rows leave and join; False if the batch is lost."""
        if not (part.evict or part.join or part.lost):
            return True
        lane = part.lane
        try:
            if part.lost:
                self._runner.abandon(lane)
            self._runner.remove(lane, part.evict)
            for job in part.join:
                self._runner.join(lane, job.number)
        except Exception as error:
            deliveries += self._lose(lane, error)
            self._runner.forget(job.number for job in part.join)
            return False
        self._hold(lane)
        return True

    def _run(self, parts: Sequence[Part], single: bool, abreast: bool) -> dict[LaneKey, Outcome]:
        """Logits (B, V) of the lanes whose token ends, and what was thrown for some lanes only."""
        tokens = {
            part.lane: [work_as(Generation, job).last_token for job in part.jobs]
            for part in parts
            if part.begins
        }
        if single:
            lane = parts[0].lane
            return {lane: self._token(lane, parts[0].jobs, tokens[lane])}
        if abreast:
            sides: defaultdict[int, list[Stretch]] = defaultdict(list)
            for part in parts:
                sides[part.side].append(Stretch(part.lane, part.calls, tokens.get(part.lane)))
            return self._runner.abreast(list(sides.values()))
        self._runner.begin(tokens)
        self._runner.advance([part.lane for part in parts])
        return self._runner.end([part.lane for part in parts if part.ends])

    def _token(self, lane: LaneKey, jobs: Sequence[Job[Work]], tokens: Sequence[int]) -> FloatArray:
        """Logits (B, V) behind these tokens of all rows; a row that is alone may run ahead."""
        if not self._may_run_ahead(lane, jobs):
            return self._runner.decode(lane, tokens)
        lead = self._ways.leads(lane).way
        if lead:
            return self._run_ahead(lane, work_as(Generation, jobs[0]), lead)
        return self._runner.decode(lane, tokens)

    def _may_run_ahead(self, lane: LaneKey, jobs: Sequence[Job[Work]]) -> bool:
        allowed = self._scheduler.limits.run_ahead and lane.steps > 1 and len(jobs) == 1
        return allowed and self._runner.runs_ahead(lane)

    def _run_ahead(self, lane: LaneKey, work: Generation, lead: int) -> FloatArray:
        """Logits (1, V) behind the row's last token, which may be under way already."""
        wave = self._runner.wave(lane, lead)
        begun = wave.tokens[:1]
        drafted_right = begun == [work.last_token]
        if begun:
            self._metrics.accepted.labels(lane.name).inc(drafted_right)
        if not drafted_right:
            wave.keep(0)
            wave.begin(work.last_token)
        while True:
            crossed = wave.cross()
            if crossed.drafts is not None:
                self._draft(lane, work, wave, crossed.drafts, done=crossed.last is not None)
            if crossed.last is not None:
                return crossed.last[None]

    def _draft(
        self, lane: LaneKey, work: Generation, wave: Wave, logits: FloatArray, done: bool
    ) -> None:
        """Go on from the first position whose draft, from logits (P, V), is new or another now."""
        begun = wave.tokens
        for behind, token in enumerate(work.drafts(logits, ahead=done), start=1):
            if begun[behind : behind + 1] != [token]:
                wave.keep(behind)
                if wave.room > 0:
                    wave.begin(token)
                    self._metrics.drafted.labels(lane.name).inc()
                return

    def _end_token(
        self, parts: Sequence[Part], found: Mapping[LaneKey, Outcome], now_s: float
    ) -> Deliveries:
        """Turn logits (B, V) into one token for each job, and let go of those that are done."""
        logits = [one for part in parts if isinstance(one := found[part.lane], np.ndarray)]
        if not logits:
            return []
        jobs = [job for part in parts for job in part.jobs]
        events = accept_tokens(jobs, logits[0] if len(logits) == 1 else np.concatenate(logits))
        cached = [length for part in parts for length in self._runner.lengths(part.lane)]
        with self._lock:
            deliveries = self._take_in(events, now_s)
            for job, length in zip(jobs, cached, strict=True):
                if length >= work_as(Generation, job).wish.window and job.state is not State.ENDED:
                    self._scheduler.read_again(job)
            evicted = {part.lane: self._scheduler.evict(part.lane) for part in parts}
        for lane, evict in evicted.items():
            if evict:
                self._runner.remove(lane, evict)
                self._hold(lane)
        return deliveries

    def _take_in(self, events: Sequence[tuple[Job[Work], Event]], now_s: float) -> Deliveries:
        """Tell what became of jobs. The caller holds the lock."""
        deliveries: Deliveries = []
        written = Written(self._metrics, now_s)
        for job, event in events:
            if job.state is State.ENDED:
                continue  # the client left while the token was made
            if isinstance(event, FailedEvent):
                self._ending.end(job, event, deliveries)
                continue
            work = work_as(Generation, job)
            written.note(job, work)
            if work.wish.stream:
                deliveries.append((work.deliver, event))
            if work.finish_reason is not None:
                self._ending.end(job, work.finished(span(job, now_s)), deliveries)
        written.count()
        return deliveries

    def _lose(self, lane: LaneKey, error: Exception) -> Deliveries:
        """A call on a whole batch threw: its caches may be in any state, so it ends here."""
        with self._lock:
            jobs = self._scheduler.rows(lane)
        deliveries = self._ending.fail(lane, jobs, error)
        with self._lock:
            self._scheduler.abandon(lane)
        self._runner.abandon(lane)
        self._hold(lane)
        return deliveries

    def _forget(self, lane: LaneKey) -> None:
        """Free what was read for jobs that have ended since."""
        with self._lock:
            over = self._scheduler.readings_over(lane)
        self._runner.forget(over)

    def _hold(self, lane: LaneKey) -> None:
        with self._lock:
            self._scheduler.hold(lane, self._runner.held_bytes(lane))

    # What is measured.

    def _compare(self, lane: LaneKey, done: float, seconds: float) -> None:
        """How the rungs of a model share the cores follows from what has been quickest here."""
        trials = self._ways.sharing(lane, self._runner)
        trials.observe(done, seconds)
        with self._lock:
            self._scheduler.share(lane.model, trials.way)

    def _count(self, parts: Sequence[Part], single: bool) -> float:
        """Count the work in the metrics; what it is worth, see Ways."""
        total = 0.0
        rows = sum(len(part.jobs) for part in parts)
        self._metrics.batch_rows.labels(parts[0].lane.name, "decode").observe(rows)
        for part in parts:
            steps = part.lane.steps if single else part.calls
            self._metrics.stepped(part.lane, "decode", len(part.jobs), steps)
            total += worth(part.lane, len(part.jobs) * steps)
        return total
