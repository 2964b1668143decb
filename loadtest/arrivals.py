"""When requests arrive: processes of a given rate, recorded traces, and the pauses of closed loops.

Gaps are drawn with a mean of one and then scaled by the rate, which may be constant or climb. So
any process can be combined with any rate. The same seed gives the same arrivals.
"""

import csv
import gzip
import math
import random
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loadtest.outcomes import Outcome

SHAPES = ("closed", "constant", "poisson", "bursty", "onoff", "replay")
RATE_SYNTAX = "requests per second: 50, levels one after another 10,20,40, or a ramp 10..100"


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second, level or climbing evenly from the first to the last moment."""

    begin_per_s: float
    end_per_s: float

    @property
    def mean_per_s(self) -> float:
        return (self.begin_per_s + self.end_per_s) / 2

    def __str__(self) -> str:
        begin, end = f"{self.begin_per_s:g}", f"{self.end_per_s:g}"
        return f"{begin}/s" if begin == end else f"{begin}..{end}/s"

    def moment_s(self, count: float, duration_s: float) -> float:
        """When so many requests are due, of a rate that takes `duration_s` from begin to end."""
        climb = (self.end_per_s - self.begin_per_s) / duration_s
        if not climb:
            return count / self.begin_per_s
        # Where the integral of the rate reaches `count`; never, if a falling rate ends before.
        square = self.begin_per_s**2 + 2 * climb * count
        return (math.sqrt(square) - self.begin_per_s) / climb if square >= 0 else math.inf


@dataclass(frozen=True, slots=True)
class Process:
    """How arrivals scatter around their rate."""

    shape: str  # constant, poisson, bursty or onoff
    burstiness: float = 4.0  # variance of the gaps, where that of Poisson is 1; onoff: peak to mean
    period_s: float = 10.0  # of onoff

    def due_s(
        self, rate: Rate, duration_s: float, seed: str, most: int | None = None
    ) -> list[float]:
        """The moments of all arrivals within `duration_s`, ascending; of the first if there is a
        limit."""
        moments: list[float] = []
        for count in self._counts(random.Random(seed)):
            moment_s = rate.moment_s(count, duration_s)
            if moment_s >= duration_s or len(moments) == most:
                break
            moments.append(self._squeezed(moment_s) if self.shape == "onoff" else moment_s)
        return moments

    def _counts(self, draw: random.Random) -> Iterator[float]:
        """Moments of a process with a mean gap of one."""
        at = 0.0
        if self.shape == "constant":
            yield at
        while True:
            match self.shape:
                case "constant":
                    at += 1.0
                case "bursty":
                    at += draw.gammavariate(1 / self.burstiness, self.burstiness)
                case _:
                    at += draw.expovariate(1.0)
            yield at

    def _squeezed(self, moment_s: float) -> float:
        """The same share of its period, at the begin of which all of the period now comes."""
        begun = moment_s // self.period_s * self.period_s
        return begun + (moment_s - begun) / self.burstiness


def parse_rates(text: str) -> list[Rate]:
    """The levels, or the one ramp, that a text stands for; ValueError if it is none."""
    if ".." in text:
        begin, _, end = text.partition("..")
        return [Rate(_positive(begin, text), _positive(end, text))]
    return [Rate(value, value) for value in (_positive(part, text) for part in text.split(","))]


def _positive(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{whole!r} is no rate; write {RATE_SYNTAX}")
    return value


# A recorded trace of arrivals: a CSV file of the user with time, prompt tokens and generated
# tokens.


FORMAT = (
    "a CSV file, .gz or not, with the columns time (seconds, or a date and time), prompt tokens "
    "and generated tokens, and a first line that may name them"
)


class TraceError(ValueError):
    """The trace cannot be replayed; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a trace; seconds after the first."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Entry]:
    """All requests, by time."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            entries = _entries(path, csv.reader(file))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise TraceError(
            f"The trace {path} cannot be read: {error}. It must be {FORMAT}."
        ) from None
    if len(entries) < 2:
        raise TraceError(f"The trace {path} holds fewer than two requests. It must be {FORMAT}.")
    entries.sort(key=lambda entry: entry.at_s)
    begin_s = entries[0].at_s
    return [Entry(one.at_s - begin_s, one.prompt_tokens, one.output_tokens) for one in entries]


def replay(
    entries: Sequence[Entry], duration_s: float, speed: float, rate_per_s: float | None
) -> list[Entry]:
    """The begin of a trace, at its own pace times `speed`, or stretched to a mean rate."""
    if rate_per_s is None:
        sped = [Entry(one.at_s / speed, one.prompt_tokens, one.output_tokens) for one in entries]
        return sped[: bisect_left([one.at_s for one in sped], duration_s)]
    count = min(round(rate_per_s * duration_s), len(entries))
    chosen = entries[: max(count, 1)]
    # So many requests are to take so long, the gap after the last one included.
    after_s = entries[count].at_s if count < len(entries) else chosen[-1].at_s
    stretch = len(chosen) / rate_per_s / after_s if after_s > 0 else 0.0
    return [Entry(one.at_s * stretch, one.prompt_tokens, one.output_tokens) for one in chosen]


def _entries(path: Path, lines: Iterable[list[str]]) -> list[Entry]:
    entries = []
    for number, cells in enumerate(lines, 1):
        if not cells:
            continue
        try:
            entries.append(Entry(_seconds(cells[0]), int(cells[1]), int(cells[2])))
        except (ValueError, IndexError):
            if number == 1:
                continue  # it names the columns
            raise TraceError(f"Line {number} of {path} is {cells}. It must be {FORMAT}.") from None
    return entries


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        # Seven digits of a second, as some systems write them, are one more than are read. The
        # zone is cut off as well: only differences matter, and no clock here may be put forward.
        return datetime.fromisoformat(text.strip()[:26]).replace(tzinfo=UTC).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


# The pause of a closed-loop caller between two requests: its think time, after a refusal the time
# of Retry-After, and a short pause after a failed connection. Without these, a few callers that are
# refused would fill the report.


THINK_SYNTAX = "seconds: 2, 1..5 drawn evenly, or exp:2 with that mean"
_KNOCK_S = 1.0  # between two attempts where there is no server
_EXPONENTIAL = "exp:"


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """Between an answer and the next question of the same caller; a mean is drawn around."""

    low_s: float
    high_s: float
    exponential: bool = False

    def draw_s(self, chance: random.Random) -> float:
        """One such time."""
        if self.exponential:
            return chance.expovariate(1 / self.low_s)
        return chance.uniform(self.low_s, self.high_s)

    def __str__(self) -> str:
        if self.exponential:
            return f"thinks {self.low_s:g} s in the mean"
        if self.low_s == self.high_s:
            return f"thinks {self.low_s:g} s"
        return f"thinks {self.low_s:g} to {self.high_s:g} s"


def parse_think_time(text: str) -> ThinkTime:
    """What a text such as 2, 1..5 or exp:2 stands for; ValueError if it is none."""
    low, dots, high = text.removeprefix(_EXPONENTIAL).partition("..")
    try:
        found = float(low), float(high if dots else low)
    except ValueError:
        found = -1.0, -1.0
    drawn = text.startswith(_EXPONENTIAL)
    if not 0 <= found[0] <= found[1] < math.inf or (drawn and (dots or not found[0])):
        raise ValueError(f"{text!r} is no think time; write {THINK_SYNTAX}")
    return ThinkTime(*found, drawn)


def rest_s(outcome: Outcome, most_s: float) -> float:
    """Seconds from the end of a request to the next."""
    if outcome.retry_after_s is not None:
        return min(outcome.retry_after_s, most_s)
    if outcome.error is not None and outcome.status is None:
        return min(max(_KNOCK_S - outcome.total_ms / 1e3, 0.0), most_s)
    return 0.0
