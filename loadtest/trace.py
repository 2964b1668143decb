"""A recorded trace of arrivals: a CSV file of time, prompt tokens and generated tokens.

The file is the user's. It deliberately knows nothing of models and their windows.
"""

import csv
import gzip
import math
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
