"""What the person who runs a test can choose about its requests, as one value.

It deliberately knows nothing of command lines, which loadtest/options.py reads.
"""

import re
from dataclasses import dataclass

from loadtest.arrivals import Process, Rate, parse_rates
from loadtest.resting import parse_think_time

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
        limit = f", at most {self.max_in_flight} under way at a time" if self.max_in_flight else ""
        return f"open loop: {how}, {words}{limit}{self._end}"

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
