"""Objectives of a load test: their syntax, and whether a test or a request meets them.

An objective is a comma-separated list of limits such as `latency_p99_ms<1000`. A failed request
counts as infinitely slow, so a server cannot meet an objective by refusing work.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.mix import Operation
from loadtest.outcomes import Outcome, is_sure, mean, percentile
from loadtest.target import ENDPOINTS

SYNTAX = (
    "limits such as latency_p99_ms<1000,ttft_p95_ms<200,tpot_p99_ms<20,error_share<0.01,"
    "accuracy>0.8; latency, ttft (time to first token), itl (time between tokens) and tpot (time "
    "per output token of a stream) with mean, p50, p90, p95, p99 or p99.9"
)
_TIME = re.compile(
    r"(?P<what>latency|ttft|itl|tpot)_(?:p(?P<percent>[0-9]{1,2}(?:\.[0-9]+)?)|mean)_ms"
)


class ObjectiveError(ValueError):
    """The text is no objective; it says what to write instead."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One condition; `share` is how many requests it must hold for, None if for their mean."""

    text: str
    what: str  # latency, ttft, itl, tpot, error_share or accuracy
    bound: float
    share: float | None = None

    @property
    def of_requests(self) -> bool:
        """Whether each single request can keep it or not."""
        return self.what in ("latency", "ttft", "itl", "tpot")

    def kept_by(self, outcome: Outcome) -> bool:
        """Whether one request kept it; one that has no such time does."""
        time_ms = _time_ms(self.what, outcome)
        return time_ms is None or time_ms < self.bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """A limit beside what was measured; value None: nothing to measure, which meets nothing.

    `sure`: another test of the same length would most likely say the same.
    """

    limit: str
    value: float | None
    met: bool
    sure: bool


@dataclass(frozen=True, slots=True)
class Objective:
    """All limits, to be met together; without limits, a right answer is all that is wanted."""

    limits: tuple[Limit, ...] = ()

    def good(self, outcome: Outcome) -> bool:
        """Whether the request was answered rightly and within every time limit."""
        return outcome.error is None and all(
            limit.kept_by(outcome) for limit in self.limits if limit.of_requests
        )

    def verdicts(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """Each limit beside what was measured."""
        return [_verdict(limit, outcomes) for limit in self.limits]

    def check(self, operations: Iterable[Operation], labelled: bool) -> None:
        """ObjectiveError if there is nothing that a limit could be measured on."""
        streams = any(ENDPOINTS[operation.endpoint].streams for operation in operations)
        for limit in self.limits:
            if limit.what in ("ttft", "itl", "tpot") and not streams:
                raise ObjectiveError(f"{limit.text!r} needs a streamed endpoint in the mix.")
            if limit.what == "accuracy" and not labelled:
                raise ObjectiveError(f"{limit.text!r} needs texts with labels: --labels FILE.")


def parse_objective(text: str) -> Objective:
    """The limits of a text; none of an empty one."""
    return Objective(tuple(_limit(part.strip()) for part in text.split(",") if part.strip()))


def _limit(text: str) -> Limit:
    sign = next((character for character in text if character in "<>"), "")
    name, _, bound = text.partition(sign) if sign else (text, "", "")
    try:
        value = float(bound)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value >= 0:
        if (time := _TIME.fullmatch(name)) and sign == "<" and value > 0:
            percent = time["percent"]
            return Limit(text, time["what"], value, float(percent) / 100 if percent else None)
        if (name, sign) in (("error_share", "<"), ("accuracy", ">")):
            return Limit(text, name, value)
    raise ObjectiveError(f"{text!r} is no limit. Write {SYNTAX}.")


def _verdict(limit: Limit, outcomes: Sequence[Outcome]) -> Verdict:
    measured = sorted(_measured(limit, outcomes))
    if not measured:
        return Verdict(limit.text, None, False, True)
    values = [value for _, value in measured]
    found = mean(values) if limit.share is None else percentile(values, limit.share * 100)
    assert found is not None, "there are values"
    met = found > limit.bound if limit.what == "accuracy" else found < limit.bound
    if limit.share is None:
        sure = is_sure(values, limit.bound)
    else:  # as many may break the limit as the percentile leaves out
        sure = is_sure([float(value >= limit.bound) for value in values], 1 - limit.share)
    return Verdict(limit.text, found if math.isfinite(found) else None, met, sure)


def _measured(limit: Limit, outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """What the limit is about, with the moment at which each request was due."""
    if limit.what == "itl":
        return _gaps([one for one in outcomes if ENDPOINTS[one.operation.endpoint].streams])
    values: list[tuple[float, float | None]]
    if limit.what == "error_share":
        values = [(one.started_s, float(one.error is not None)) for one in outcomes]
    elif limit.what == "accuracy":
        known = [one for one in outcomes if one.correct is not None]
        values = [(one.started_s, float(bool(one.correct))) for one in known]
    else:
        values = [(one.started_s, _time_ms(limit.what, one)) for one in outcomes]
    return [(at_s, value) for at_s, value in values if value is not None]


def _gaps(streams: Sequence[Outcome]) -> list[tuple[float, float]]:
    """The times between tokens; a stream that failed counts as one that waits for each of them."""
    right = [one for one in streams if one.error is None]
    gaps = [(one.started_s, gap) for one in right for gap in one.gaps_ms]
    usual = max(round(len(gaps) / len(right)), 1) if right else 1
    failed = [one for one in streams if one.error is not None]
    return gaps + [(one.started_s, math.inf) for one in failed for _ in range(usual)]


def _time_ms(what: str, outcome: Outcome) -> float | None:
    if what == "itl":
        return outcome.gap_ms
    if what == "tpot":
        failed = outcome.error is not None and ENDPOINTS[outcome.operation.endpoint].streams
        return math.inf if failed else outcome.gap_ms
    if what == "ttft":
        streamed = ENDPOINTS[outcome.operation.endpoint].streams
        if not streamed or (outcome.error is None and outcome.first_token_ms is None):
            return None
        return outcome.first_token_ms if outcome.error is None else math.inf
    return outcome.total_ms if outcome.error is None else math.inf
