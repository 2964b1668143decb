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
    length: int  # of the longest row, which all are padded to, while they are written

    @property
    def tokens_waiting(self) -> int:
        """Of all that wait; the first of each comes with its prompt."""
        return self.lane.waiting_tokens - len(self.lane.waiting)

    @property
    def tokens_left(self) -> int:
        """Of all that run and wait."""
        return sum([job.tokens_left for job in self.occupants]) + self.tokens_waiting


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
            rows = len(occupants) + waiting
            if rows:
                rows = rows if rows < max_rows else max_rows
                unread, prompts, unread_s = lane.waiting_prompt_tokens, waiting, 0.0
                if lane.reading is not None:
                    unread, prompts = unread + lane.reading.lengths[0], prompts + 1
                if prompts:
                    unread_s = prices.prompts_s(lane.key, unread, prompts, lane.prefill_series)
                    self.unread_s += unread_s
                token = prices.token(lane.key, rows, lane.decode_series)
                self._tokens.append((lane.key.steps, token))
                # Of rows that began at random, the longest has as much of its way behind it.
                first = occupants[0] if occupants else lane.waiting[0]
                prompt = first.lengths[0]
                length = prompt + (first.positions - prompt) * rows // (rows + 1)
                self.busy[lane.key] = Busy(lane, occupants, rows, token, unread_s, length)
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
        return 1.0 if steps <= other else math.sqrt(steps / other)

    def round(self, steps: int) -> Line:
        """From one token of a lane of so many steps to the next, with the rows of all lanes."""
        line = self._rounds.get(steps)
        if line is None:
            fixed_s, each_s = self._beside_s, 0.0
            in_one = self._in_one_call
            for other, (other_fixed_s, other_each_s) in self._tokens:
                ratio = steps / other  # as in `often`; asked for every request that comes
                often = ratio if in_one else 1.0 if ratio <= 1.0 else math.sqrt(ratio)
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

    def waiting_s(self, busy: Busy[WorkT]) -> float:
        """What those that wait add to the time until a place is free for others."""
        fixed_s, each_s = self.round(busy.lane.key.steps)
        tokens = busy.tokens_waiting / self._max_rows
        return busy.unread_s + tokens * (fixed_s + each_s * busy.length)

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
        lane, left = busy.lane, [job.tokens_left for job in busy.occupants]
        waiting = len(lane.waiting)
        if (behind := waiting + len(left) - self._max_rows) < 0:
            return 0.0, 0.0
        if behind < len(left):
            left.sort()
            tokens: float = left[behind]
        else:
            # What the others will have left when a place is free: as much more than the first that
            # ends as now, and no less than since prompts are read one after the other.
            running, all_waiting = sum(left), lane.waiting_tokens - waiting
            after: float = running - len(left) * min(left) if left else 0
            most = all_waiting / waiting
            apart = (self._max_rows - 1) * (most if most < self._max_rows else self._max_rows) / 2
            after = after if after > apart else apart
            tokens = (running + all_waiting - after) / self._max_rows
        fixed_s, each_s = self.round(lane.key.steps)
        return tokens, tokens * (fixed_s + each_s * busy.length)
