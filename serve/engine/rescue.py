"""What is done about calls that take far too long: ask the runtime to end them, then leave.

Knows how long calls usually take, and how the runtime is asked; whether one is late is for the
watchdog to say, and how the process ends for whoever gave us `leave`.
"""

import logging
from collections.abc import Callable

from serve.engine.ending import in_requests, request_ids
from serve.engine.failing import CheckCall, Failing
from serve.engine.pace import CallTimes
from serve.engine.rechecks import RecheckCall
from serve.engine.runner import Runner
from serve.engine.work import Work
from serve.errors import ModelFailure, ServeError
from serve.metrics import Metrics
from serve.scheduler.job import (
    Call,
    CallKind,
    ClassifyCall,
    DecodeCall,
    Job,
    LaneKey,
    PrefillCall,
    SearchCall,
)
from serve.scheduler.latency_model import LatencyModel, Series

AnyCall = Call[Work] | CheckCall | RecheckCall

_log = logging.getLogger("stepdial")


class Rescue:
    """The keeper of the engine's watchdog."""

    def __init__(
        self,
        runner: Runner,
        times: CallTimes,
        latency: LatencyModel,
        failing: Failing,
        metrics: Metrics,
        abort: Callable[[ServeError], None],
        leave: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._times = times
        self._latency = latency
        self._failing = failing
        self._metrics = metrics
        self._abort = abort
        self._leave = leave

    def usual_s(self, call: AnyCall) -> float | None:
        if self._runner.opening(call.lane):
            return None
        known = [seconds for seconds in self._known_s(call) if seconds]
        return max(known, default=None)

    def interrupt(self, call: AnyCall, seconds: float) -> None:
        lane = call.lane
        ids = request_ids(jobs_of(call))
        _log.error(
            "a call of %s at %d steps%s has taken %.1f s: it is asked to end, and no request is "
            "taken until it has",
            *(lane.name, lane.steps, in_requests(ids), seconds),
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        self._metrics.late_calls.labels(lane.name).inc()
        self._runner.interrupt(lane)

    def ended(self, call: AnyCall) -> None:
        self._runner.resume(call.lane)
        if call.lane.model in self._failing.models:  # else it came to its own end
            self._metrics.terminated_calls.labels(call.lane.name).inc()

    def give_up(self, call: AnyCall, seconds: float) -> None:
        lane = call.lane
        ids = request_ids(jobs_of(call))
        _log.critical(
            "a call of %s at %d steps%s has taken %.1f s and does not end: the process does, to be "
            "started again",
            *(lane.name, lane.steps, in_requests(ids), seconds),
            extra={"fields": {"model": lane.name, "steps": lane.steps, "requests": ids}},
        )
        self._leave()
        self._abort(
            ModelFailure(f"{lane.name} does not answer and is started again: send it again later")
        )

    def _known_s(self, call: AnyCall) -> list[float | None]:
        """What calls like this took lately, and what they are predicted to."""
        match call:
            case ClassifyCall():
                return [call.seconds, self._times.seconds((call.lane, "classify"))]
            case PrefillCall():
                length = 1 if call.job is None else call.job.lengths[0]
                return self._written_s(call.lane, "prefill", 1, length)
            case DecodeCall():
                return [
                    seconds
                    for part in call.parts
                    for seconds in self._written_s(
                        part.lane,
                        "decode",
                        len(part.jobs),
                        max((job.positions for job in part.jobs), default=1),
                    )
                ]
            case CheckCall() | RecheckCall():
                return []
            case SearchCall():
                return [self._times.seconds((call.lane, "search"))]

    def _written_s(
        self, lane: LaneKey, kind: CallKind, rows: int, length: int
    ) -> list[float | None]:
        series = Series(lane.model, kind, lane.steps)
        return [self._times.seconds((lane, kind)), self._latency.call_s(series, rows, length)]


def jobs_of(call: AnyCall) -> list[Job[Work]]:
    """Those that wait for this call."""
    match call:
        case ClassifyCall():
            return [job for job, _ in call.rows]
        case DecodeCall():
            return [job for part in call.parts for job in part.jobs]
        case PrefillCall() | SearchCall():
            return [] if call.job is None else [call.job]
        case CheckCall() | RecheckCall():
            return []
