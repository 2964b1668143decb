"""The outlook of a generation: when it could begin, and when its last token would come.

From the lanes as they are and the times that were observed, each read once: an outlook is of one
moment. It deliberately knows neither HTTP nor what is done about it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import Job, LaneKey, WorkT
from serve.scheduler.latency_model import IDLE_ANSWER_S, LatencyModel, Line, Series


class Asked(NamedTuple):
    """Generations that are asked for at once."""

    prompt: int  # tokens to read of each
    tokens: int  # and to write
    jobs: int = 1


class _Due(NamedTuple, Generic[WorkT]):
    """Those of a lane that have a deadline, and run or are next."""

    steps: int
    length: int
    token_s: float  # from one to the next, as long as nobody comes
    pressing: list[Job[WorkT]]  # in whose place no other of them could be late
    jobs: list[Job[WorkT]]


class Outlook(Generic[WorkT]):
    """Predicts for one model that writes."""

    def __init__(
        self,
        model: str,
        lanes: Iterable[GenerateLane[WorkT]],
        latency: LatencyModel,
        max_rows: int,
        usual_s: Callable[[LaneKey], float | None],
        beside_s: float,
    ) -> None:
        self.model = model
        self._latency = latency
        self._max_rows = max_rows
        self._usual_s = usual_s  # a token of a lane
        self._beside_s = beside_s  # other models, between two calls
        self._lanes: dict[LaneKey, GenerateLane[WorkT]] = {}
        self._occupants: dict[LaneKey, list[Job[WorkT]]] = {}
        self._unread: dict[LaneKey, float] = {}  # seconds, of prompts that tokens wait for
        self._rows: dict[LaneKey, int] = {}
        self._tokens: dict[LaneKey, Line] = {}  # of the rows there are
        self._rounds: dict[int, Line] = {}  # by steps
        self._places: dict[LaneKey, float] = {}  # seconds until there is one
        self._behind: list[_Due[WorkT]] | None = None
        for lane in lanes:
            occupants, waiting = lane.occupants(), len(lane.waiting)
            rows = min(max_rows, len(occupants) + waiting)
            if rows:
                key = lane.key
                self._lanes[key], self._occupants[key], self._rows[key] = lane, occupants, rows
                self._unread[key] = self._unread_s(lane, waiting)
                self._tokens[key] = self._token(key, lane.decode_series, rows)
        self._all_unread_s = sum(self._unread.values())

    def token_s(self, key: LaneKey, rows: int, length: int) -> float:
        """A token of a lane, if so many rows decode together; 0 if nothing is known."""
        fixed_s, each_s = self._token(key, _decode(key), rows)
        return fixed_s + each_s * length

    def alone_s(self, key: LaneKey, asked: Asked) -> float:
        """The time of whole answers on an idle server."""
        each_s = self.token_s(key, min(self._max_rows, asked.jobs), _length(asked))
        return self._read_s(key, asked) + self._waves(asked) * each_s + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, asked: Asked) -> float:
        """The time until the last token of all; seldom longer."""
        read_s = self._all_unread_s + self._read_s(key, asked)
        return self._ready_s(key, asked, read_s, self._more(key, asked.jobs))

    def late_s(
        self, key: LaneKey, asked: Asked, ends_s: float, now_s: float, share: float = 1.0
    ) -> float:
        """By how much these would be late, or one that they push back, at worst.

        Each is to take a share of the time that is left to it. Not above 0: in time. Who will be
        late in any case does not count.
        """
        return max(self._late_s(key, asked, ends_s, now_s, share))

    def in_time(
        self, key: LaneKey, asked: Asked, ends_s: float, now_s: float, share: float = 1.0
    ) -> bool:
        """Whether none of those would be late."""
        return all(late_s <= 0 for late_s in self._late_s(key, asked, ends_s, now_s, share))

    def wait_s(self, key: LaneKey) -> float:
        """The time until a place is free for one more of this lane, behind those that wait."""
        return self._place_s(key) + self._unread[key] if key in self._lanes else 0.0

    def all_begin_s(self) -> float:
        """The time until nobody waits for a place any more."""
        waits_s = [self.wait_s(key) for key, lane in self._lanes.items() if lane.waiting]
        return max(waits_s, default=0.0)

    def _late_s(
        self, key: LaneKey, asked: Asked, ends_s: float, now_s: float, share: float
    ) -> Iterator[float]:
        """Of these, then of each lane at worst."""
        more = more_fixed_s, more_each_s = self._more(key, asked.jobs)
        read_s = self._all_unread_s + self._read_s(key, asked)
        yield self._ready_s(key, asked, read_s, more) - share * (ends_s - now_s)
        caution, unread_s = self._latency.caution, self._all_unread_s
        begin_s = now_s + self._latency.answer_s
        if self._behind is None:
            self._behind = list(map(self._due, self._lanes.values()))
        for steps, length, before_s, pressing, due in self._behind:
            if not due:
                continue
            often = math.sqrt(steps / key.steps) if steps > key.steps else 1.0
            after_s = before_s + often * (more_fixed_s + more_each_s * length)
            late_s = [
                caution * (read_s + job.tokens_left * after_s) - share * (job.ends_s - begin_s)
                for job in pressing
            ]
            if max(late_s) > 0:
                late_s = [
                    caution * (read_s + job.tokens_left * after_s) - share * (job.ends_s - begin_s)
                    for job in due
                    if caution * (unread_s + job.tokens_left * before_s) <= job.ends_s - begin_s
                ]
            yield max(late_s, default=0.0)

    def _due(self, lane: GenerateLane[WorkT]) -> "_Due[WorkT]":
        running = [job for job in self._occupants[lane.key] if job.ends_s < math.inf]
        pressing, due = running + lane.pressing, running + lane.next_due
        length = due[0].positions // 2 if due else 0
        fixed_s, each_s = self._round(lane.key.steps)
        return _Due(lane.key.steps, length, fixed_s + each_s * length, pressing, due)

    def _ready_s(self, key: LaneKey, asked: Asked, read_s: float, more: Line) -> float:
        fixed_s, each_s = self._round(key.steps)
        round_s = fixed_s + more[0] + (each_s + more[1]) * _length(asked)
        work_s = self._place_s(key) + read_s + self._waves(asked) * round_s
        return work_s * self._latency.caution + self._latency.answer_s

    def _place_s(self, key: LaneKey) -> float:
        """The time until a place is free, without the prompts that are read until then."""
        place_s = self._places.get(key)
        if place_s is None:
            lane = self._lanes.get(key)
            place_s = self._places[key] = 0.0 if lane is None else self._lane_place_s(lane)
        return place_s

    def _lane_place_s(self, lane: GenerateLane[WorkT]) -> float:
        occupants = self._occupants[lane.key]
        behind = len(lane.waiting) + len(occupants) - self._max_rows
        if behind < 0:
            return 0.0
        fixed_s, each_s = self._round(lane.key.steps)
        round_s = fixed_s + each_s * (1 + (occupants or lane.waiting)[0].positions // 2)
        left = [job.tokens_left for job in occupants]
        if behind < len(left):
            return sorted(left)[behind] * round_s
        return (sum(left) + lane.waiting_tokens) / self._max_rows * round_s

    def _round(self, steps: int) -> Line:
        """From one token of a lane of so many steps to the next, with the rows of all lanes.

        Fewer steps have a token more often: see Decoding.
        """
        line = self._rounds.get(steps)
        if line is None:
            fixed_s, each_s = self._beside_s, 0.0
            for other, (other_fixed_s, other_each_s) in self._tokens.items():
                often = math.sqrt(steps / other.steps) if steps > other.steps else 1.0
                fixed_s += often * other_fixed_s
                each_s += often * other_each_s
            line = self._rounds[steps] = fixed_s, each_s
        return line

    def _more(self, key: LaneKey, jobs: int) -> Line:
        """By how much longer a token of a lane takes with so many more rows."""
        had = self._rows.get(key, 0)
        if had == self._max_rows:
            return 0.0, 0.0
        fixed_s, each_s = self._token(key, _decode(key), min(self._max_rows, had + jobs))
        before_fixed_s, before_each_s = self._tokens.get(key, (0.0, 0.0))
        return fixed_s - before_fixed_s, each_s - before_each_s

    def _token(self, key: LaneKey, series: Series, rows: int) -> Line:
        """A token of so many rows of a lane."""
        line = self._latency.decode_line(series, rows)
        return line or (self._usual_s(key) or 0.0, 0.0)

    def _waves(self, asked: Asked) -> int:
        """Tokens come for all rows that there may be; the first is that of the prompt."""
        return -(-asked.jobs // self._max_rows) * (asked.tokens - 1)

    def _read_s(self, key: LaneKey, asked: Asked) -> float:
        series = Series(key.model, "prefill", key.steps)
        return self._prompts_s(series, asked.jobs * asked.prompt, asked.jobs)

    def _unread_s(self, lane: GenerateLane[WorkT], waiting: int) -> float:
        """The time to read the prompts of a lane that are not read yet."""
        tokens, prompts = lane.waiting_prompt_tokens, waiting
        if lane.reading is not None:
            tokens, prompts = tokens + lane.reading.lengths[0], prompts + 1
        return self._prompts_s(lane.prefill_series, tokens, prompts) if prompts else 0.0

    def _prompts_s(self, series: Series, tokens: int, prompts: int) -> float:
        """The time to read so many prompts of so many tokens in all, one after the other."""
        return prompts * (self._latency.call_s(series, 1, round(tokens / prompts)) or 0.0)


def _decode(key: LaneKey) -> Series:
    return Series(key.model, "decode", key.steps)


def _length(asked: Asked) -> int:
    """How long each is on average while it is written."""
    return asked.prompt + asked.tokens // 2
