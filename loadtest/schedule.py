"""The terms of a test, and the schedule of an open loop: every request, before the first is sent.

The same terms give the same schedule in every process, so that workers can share one.
"""

import math
import random
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.arrivals import Entry, Process, Rate, parse_rates, parse_think_time, replay
from loadtest.mix import Operation, RoundRobin
from loadtest.outcomes import WARM_UP

# What the person who runs a test can choose about its requests, as one value.


DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MAX_TOKENS = 64
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_DURATION_S = 30.0
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")
_LENGTHS = re.compile(r"([1-9][0-9]*)(?:\.\.([1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class Terms:
    """How much of what is sent when. Empty texts: not chosen."""

    url: str = DEFAULT_URL
    mix: str = ""  # empty: every rung of every model equally
    max_tokens: int = DEFAULT_MAX_TOKENS
    timeout_s: float = DEFAULT_TIMEOUT_S  # of silence, before a request counts as failed
    shape: str = "closed"
    rates: tuple[Rate, ...] = ()  # one level after another
    duration_s: float = DEFAULT_DURATION_S  # of each level; infinite where only `requests` ends it
    requests: int | None = None  # of each level, at most; those of the warm-up are not counted
    warm_up_s: float = 0.0
    pause_s: float = 2.0  # between levels
    drain_s: float = DEFAULT_TIMEOUT_S  # for answers that are still due when all is sent
    apart: bool = False  # each operation by itself, in turn
    burstiness: float = 4.0
    period_s: float = 10.0
    trace: str = ""
    speed: float = 1.0
    length_scale: float = 1.0
    prompt_tokens: str = ""
    seed: int = 0
    labels: str = ""
    prompts: str = ""
    objective: str = ""
    max_lag_ms: float = 10.0
    max_rest_s: float = 10.0  # of a caller who was refused
    think_time: str = ""  # of a caller who was answered
    max_in_flight: int | None = None  # of an open loop
    api_key_file: str = ""

    @property
    def open(self) -> bool:
        """Whether requests are sent when they are due, whatever became of those before."""
        return self.shape != "closed"

    @property
    def process(self) -> Process:
        """How arrivals scatter, where they are drawn."""
        return Process(self.shape, self.burstiness, self.period_s)

    @property
    def arrivals(self) -> str:
        """When requests come, for people."""
        if not self.open:
            thinks = f", then {parse_think_time(self.think_time)}" if self.think_time else ""
            return f"closed loop: each user waits for its answer{thinks}{self._end}"
        words = ", ".join(map(str, self.rates)) or f"at {self.speed:g} times its own pace"
        match self.shape:
            case "bursty":
                how = f"bursty arrivals (variance of gaps {self.burstiness:g})"
            case "onoff":
                how = f"arrivals in one {self.burstiness:g}th of {self.period_s:g} s"
            case "replay":
                how = "a replayed trace"
            case other:
                how = f"{'Poisson' if other == 'poisson' else other} arrivals"
        limit = f", at most {self.max_in_flight} in flight at a time" if self.max_in_flight else ""
        return f"open loop: {how}, {words}{limit}{self._end}"

    @property
    def texts(self) -> str:
        """What decides how long texts are and what they say, for people; files by their names."""
        parts = [f"answers of at most {self.max_tokens} tokens"]
        if self.prompt_tokens:
            parts.append(f"prompts of {self.prompt_tokens} tokens")
        if self.trace:
            parts.append(f"lengths of {Path(self.trace).name} times {self.length_scale:g}")
        files = [Path(file).name for file in (self.prompts, self.labels) if file]
        return ", ".join([*parts, *(f"texts of {name}" for name in files)])

    @property
    def _end(self) -> str:
        if self.requests is None:
            return ""
        return f"; {self.requests} requests" + (" at each rate" if len(self.rates) > 1 else "")


def parse_duration(text: str) -> float:
    """Seconds of a text such as 30s, 2m, 1h30m or 45; ValueError if it is none."""
    match = _DURATION.fullmatch(f"{text}s" if text.isdecimal() else text)
    hours, minutes, seconds = match.groups() if match else (None, None, None)
    total_s = int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(seconds or 0)
    if match is None or not text or total_s <= 0:
        raise ValueError(f"{text!r} is no duration; write 30s, 2m or 1h30m")
    return total_s


def parse_lengths(text: str) -> tuple[int, int] | None:
    """The least and the most tokens of a text such as 64 or 16..200; None for an empty one."""
    if not text:
        return None
    match = _LENGTHS.fullmatch(text)
    low, high = match.groups() if match else (None, None)
    if low is None or int(low) > int(high or low):
        raise ValueError(f"{text!r} is no number of tokens; write 64 or 16..200")
    return int(low), int(high or low)


def parse_levels(text: str) -> tuple[Rate, ...]:
    """The rates of a text; none of an empty one."""
    return tuple(parse_rates(text)) if text else ()


SHORTEST_S = 1.0  # of requests that are all due at once, as a trace may have them
RAMP_PARTS = 8  # a ramp is reported in so many parts of different rates


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when it is due, and what decides what it says."""

    due_s: float  # after the begin of the test
    stage: int
    operation: Operation
    turn: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of time with one rate; `only` is the operation that had it for itself."""

    begin_s: float
    duration_s: float
    rate_per_s: float | None  # that was planned; None in a closed loop
    only: Operation | None = None

    def until(self, moment_s: float) -> "Stage":
        """As much of it as there was by then."""
        return replace(self, duration_s=min(max(moment_s - self.begin_s, 0.0), self.duration_s))


@dataclass(frozen=True, slots=True)
class Schedule:
    """All stages, and all requests by time; those of the warm-up belong to no stage."""

    stages: tuple[Stage, ...]
    shots: tuple[Shot, ...]
    length_s: float

    def share(self, index: int, of: int) -> tuple[Shot, ...]:
        """What one of so many senders sends."""
        return self.shots[index::of]


class Scheduler:
    """Lays stages one after another."""

    def __init__(
        self, terms: Terms, weights: dict[Operation, float], trace: Sequence[Entry]
    ) -> None:
        self._terms, self._weights, self._trace = terms, weights, trace
        self._operations = RoundRobin(weights, terms.seed)
        self._draw = random.Random(f"{terms.seed}/lengths")
        self._lengths = parse_lengths(terms.prompt_tokens)
        self._stages: list[Stage] = []
        self._shots: list[Shot] = []
        self._at_s = 0.0

    def lay(self) -> Schedule:
        """The whole schedule."""
        terms = self._terms
        rates: Sequence[Rate | None] = terms.rates or (None,)
        if terms.warm_up_s:
            first = rates[0] and Rate(rates[0].begin_per_s, rates[0].begin_per_s)
            self._add(self._arrivals(first, terms.warm_up_s, "warm-up", None), WARM_UP, None)
            self._at_s += terms.warm_up_s
        operations = sorted(self._weights, key=lambda each: each.place) if terms.apart else [None]
        levels = [(rate, only) for rate in rates for only in operations]
        for number, (rate, only) in enumerate(levels):
            arrivals, duration_s = self._level(rate, str(number))
            parts = self._parts(rate, arrivals, duration_s)
            for part in parts:
                self._stages.append(
                    Stage(self._at_s + part.begin_s, part.duration_s, part.rate_per_s, only)
                )
                # A trace may end with the level: its last requests are due then.
                end_s = math.inf if part is parts[-1] else part.begin_s + part.duration_s
                self._add(_between(arrivals, part.begin_s, end_s), len(self._stages) - 1, only)
            self._at_s += duration_s
            if number < len(levels) - 1:
                self._at_s += terms.pause_s
        return Schedule(tuple(self._stages), tuple(self._shots), self._at_s)

    def _level(self, rate: Rate | None, name: str) -> tuple[list[Entry], float]:
        """What is due at one rate, and how long that takes."""
        duration_s, most = self._terms.duration_s, self._terms.requests
        if self._terms.shape == "replay" and rate:  # stretched to it exactly, as far as it goes
            count = min(most or math.inf, len(self._trace))
            duration_s = min(duration_s, count / rate.mean_per_s)
            return self._arrivals(rate, duration_s, name, None), duration_s
        if most is None:
            arrivals = self._arrivals(rate, duration_s, name, None)
            return arrivals, duration_s if rate else self._until_end(arrivals, duration_s)
        arrivals = self._arrivals(rate, duration_s, name, most + 1)
        if len(arrivals) > most:  # it lasts until the next would have been due
            return arrivals[:most], arrivals[most].at_s or SHORTEST_S
        return arrivals, duration_s if rate else self._until_end(arrivals, duration_s)

    def _until_end(self, arrivals: Sequence[Entry], duration_s: float) -> float:
        """How long a trace takes at its own pace: no longer than it is."""
        whole = len(arrivals) == len(self._trace)
        return min(duration_s, arrivals[-1].at_s or SHORTEST_S) if whole else duration_s

    def _arrivals(
        self, rate: Rate | None, duration_s: float, name: str, most: int | None
    ) -> list[Entry]:
        terms = self._terms
        if terms.shape == "replay":
            mean = rate.mean_per_s if rate else None
            scaled = replay(self._trace, duration_s, terms.speed, mean)
            size = terms.length_scale
            return [
                Entry(one.at_s, round(one.prompt_tokens * size), round(one.output_tokens * size))
                for one in scaled[:most]
            ]
        assert rate is not None, "only a trace has a pace of its own"
        due_s = terms.process.due_s(rate, duration_s, f"{terms.seed}/{name}", most)
        return [Entry(moment_s, 0, 0) for moment_s in due_s]

    def _parts(
        self, rate: Rate | None, arrivals: Sequence[Entry], duration_s: float
    ) -> list[Stage]:
        if rate is None:
            return [Stage(0.0, duration_s, len(arrivals) / duration_s if duration_s else None)]
        if rate.begin_per_s == rate.end_per_s:
            return [Stage(0.0, duration_s, rate.mean_per_s)]
        part_s = duration_s / RAMP_PARTS
        climb = (rate.end_per_s - rate.begin_per_s) / RAMP_PARTS
        return [
            Stage(part * part_s, part_s, rate.begin_per_s + (part + 0.5) * climb)
            for part in range(RAMP_PARTS)
        ]

    def _add(self, arrivals: Sequence[Entry], stage: int, only: Operation | None) -> None:
        replayed = self._terms.shape == "replay"
        for entry in arrivals:
            prompt = self._draw.randint(*self._lengths) if self._lengths else None
            self._shots.append(
                Shot(
                    due_s=self._at_s + entry.at_s,
                    stage=stage,
                    operation=only or self._operations.next(),
                    turn=len(self._shots),
                    prompt_tokens=max(entry.prompt_tokens, 1) if replayed else prompt,
                    output_tokens=max(entry.output_tokens, 1) if replayed else None,
                )
            )


def _between(arrivals: Sequence[Entry], begin_s: float, end_s: float) -> Sequence[Entry]:
    moments = [entry.at_s for entry in arrivals]
    return arrivals[bisect_left(moments, begin_s) : bisect_left(moments, end_s)]
