"""The rounds in which the generations of one model get their tokens, as its lanes are now.

Knows what rows take and when a place is free; nothing of deadlines, nor of what is asked for.
"""

import math
from collections.abc import Iterable
from typing import Generic, NamedTuple

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import Job, LaneKey, WorkT
from serve.scheduler.latency_model import Line
from serve.scheduler.writing_prices import WritingPrices


class Busy(NamedTuple, Generic[WorkT]):
    """A lane in which somebody waits or runs."""

    lane: GenerateLane[WorkT]
    occupants: list[Job[WorkT]]
    rows: int  # that decode together, now or soon
    token: Line  # of those rows
    unread_s: float  # of prompts that tokens wait for

    @property
    def length(self) -> int:
        """Of its rows, while they are written."""
        first = self.occupants[0] if self.occupants else self.lane.waiting[0]
        return 1 + first.positions // 2

    @property
    def tokens_left(self) -> int:
        """Of all that run and wait."""
        return sum([job.tokens_left for job in self.occupants]) + self.lane.waiting_tokens

    @property
    def waiting_share(self) -> float:
        """Of those tokens, the share of all that wait."""
        return self.lane.waiting_tokens / max(1, self.tokens_left)


class Rounds(Generic[WorkT]):
    """The lanes of one model in which there is something to do."""

    def __init__(
        self,
        lanes: Iterable[GenerateLane[WorkT]],
        prices: WritingPrices,
        max_rows: int,
        beside_s: float,
        together: bool = False,
    ) -> None:
        """`together` if the lanes share calls, those that fit."""
        self.busy: dict[LaneKey, Busy[WorkT]] = {}
        self.unread_s = 0.0  # of all prompts that are not read yet
        self._prices = prices
        self._max_rows = max_rows
        self._beside_s = beside_s  # other models, between two calls
        self._tokens: list[tuple[int, Line]] = []  # of each lane, with its steps
        self._rounds: dict[int, Line] = {}  # by steps
        self._places: dict[LaneKey, tuple[float, float]] = {}
        for lane in lanes:
            occupants, waiting = lane.occupants(), len(lane.waiting)
            rows = min(max_rows, len(occupants) + waiting)
            if rows:
                unread_s = self._unread_s(lane, waiting)
                self.unread_s += unread_s
                token = prices.token(lane.key, rows, lane.decode_series)
                self._tokens.append((lane.key.steps, token))
                self.busy[lane.key] = Busy(lane, occupants, rows, token, unread_s)
        # Lanes that do not fit into one call take turns, as others do.
        self._in_one_call = together and sum([one.rows for one in self.busy.values()]) <= max_rows

    @property
    def calls(self) -> int:
        """The decoding calls of a round."""
        if len(self.busy) < 2:
            return 1
        return max(len(self.busy), *(one.lane.calls_a_token for one in self.busy.values()))

    def often(self, steps: int, other: int) -> float:
        """The tokens of a lane of other steps in the time of one of so many: see Decoding."""
        if self._in_one_call:
            return steps / other
        return math.sqrt(steps / other) if steps > other else 1.0

    def round(self, steps: int) -> Line:
        """From one token of a lane of so many steps to the next, with the rows of all lanes."""
        line = self._rounds.get(steps)
        if line is None:
            fixed_s, each_s = self._beside_s, 0.0
            for other, (other_fixed_s, other_each_s) in self._tokens:
                often = self.often(steps, other)
                fixed_s += often * other_fixed_s
                each_s += often * other_each_s
            line = self._rounds[steps] = fixed_s, each_s
        return line

    def more(self, key: LaneKey, jobs: int) -> Line:
        """By how much longer a token of a lane takes with so many more rows."""
        busy = self.busy.get(key)
        if busy is None:
            return self._prices.token(key, min(self._max_rows, jobs))
        if busy.rows == self._max_rows:
            return 0.0, 0.0
        fixed_s, each_s = self._prices.token(
            key, min(self._max_rows, busy.rows + jobs), busy.lane.decode_series
        )
        return fixed_s - busy.token[0], each_s - busy.token[1]

    def place(self, key: LaneKey) -> tuple[float, float]:
        """Tokens, and their time, until a place is free; without the prompts read until then."""
        place = self._places.get(key)
        if place is None:
            busy = self.busy.get(key)
            place = self._places[key] = (0.0, 0.0) if busy is None else self._lane_place(busy)
        return place

    def seconds(self, calls: float) -> float:
        """What decoding takes in so many turns, if there is as much to do."""
        total_s = rounds = 0.0
        for busy in self.busy.values():
            tokens = busy.tokens_left / busy.rows
            total_s += tokens * (busy.token[0] + busy.token[1] * busy.length)
            rounds = max(rounds, tokens)
        needed = rounds * self.calls
        return total_s if needed <= calls else total_s * calls / needed

    def _lane_place(self, busy: Busy[WorkT]) -> tuple[float, float]:
        lane, occupants = busy.lane, busy.occupants
        behind = len(lane.waiting) + len(occupants) - self._max_rows
        if behind < 0:
            return 0.0, 0.0
        fixed_s, each_s = self.round(lane.key.steps)
        round_s = fixed_s + each_s * busy.length
        if behind < len(occupants):
            tokens: float = sorted([job.tokens_left for job in occupants])[behind]
        else:
            tokens = busy.tokens_left / self._max_rows
        return tokens, tokens * round_s

    def _unread_s(self, lane: GenerateLane[WorkT], waiting: int) -> float:
        """The time to read the prompts of a lane that are not read yet."""
        tokens, prompts = lane.waiting_prompt_tokens, waiting
        if lane.reading is not None:
            tokens, prompts = tokens + lane.reading.lengths[0], prompts + 1
        if not prompts:
            return 0.0
        return self._prices.prompts_s(lane.key, tokens, prompts, lane.prefill_series)
