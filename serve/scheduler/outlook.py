"""The outlook of a generation: when it could begin, and when its last token would come.

From the lanes as they are and the times that were observed, each read once: an outlook is of one
moment. It deliberately knows neither HTTP nor what is done about it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import Job, LaneKey, WorkT
from serve.scheduler.latency_model import IDLE_ANSWER_S, LatencyModel, Line
from serve.scheduler.rounds import Busy, Rounds
from serve.scheduler.search_lane import SearchLane
from serve.scheduler.searching import Searching
from serve.scheduler.writing_prices import WritingPrices


class Asked(NamedTuple):
    """Generations, or searches, that are asked for at once."""

    prompt: int  # tokens to read of each
    tokens: int  # and to write
    jobs: int = 1
    beams: int = 1  # of each


class _New(NamedTuple):
    """Those that are asked for: when they would be ready, and what they take from others."""

    steps: int
    ready_s: float
    read_s: float = 0.0  # of their prompts
    more: Line = (0.0, 0.0)  # for each token of others
    calls: int = 0  # of searches, in turn with those of others
    each_s: float = 0.0  # of those calls


class Outlook(Generic[WorkT]):
    """Predicts for one model that writes."""

    def __init__(
        self,
        model: str,
        lanes: Iterable[GenerateLane[WorkT]],
        searches: Iterable[SearchLane[WorkT]],
        latency: LatencyModel,
        max_rows: int,
        prices: WritingPrices,
        beside_s: float,
        together: bool = False,
    ) -> None:
        self.model = model
        self._caution, self._answer_s = latency.caution(model), latency.answer_s
        self._max_rows = max_rows
        self._prices = prices
        self._rounds: Rounds[WorkT] = Rounds(lanes, prices, max_rows, beside_s, together)
        self._searching: Searching[WorkT] = Searching(searches, prices, max_rows)
        self._beside_s = beside_s  # other models, between two calls

    def token_s(self, key: LaneKey, rows: int, length: int) -> float:
        """A token of a lane, if so many rows decode together; 0 if nothing is known."""
        fixed_s, each_s = self._prices.token(key, rows)
        return fixed_s + each_s * length

    def alone_s(self, key: LaneKey, asked: Asked) -> float:
        """The time of whole answers on an idle server."""
        if key.kind == "search":
            return asked.jobs * self._searched_s(key, asked) + IDLE_ANSWER_S
        each_s = self.token_s(key, min(self._max_rows, asked.jobs), _length(asked))
        return self._read_s(key, asked) + self._waves(asked) * each_s + IDLE_ANSWER_S

    def ready_s(self, key: LaneKey, asked: Asked) -> float:
        """The time until the last token of all; seldom longer."""
        return self._new(key, asked).ready_s

    def late_s(
        self, key: LaneKey, asked: Asked, ends_s: float, now_s: float, share: float = 1.0
    ) -> float:
        """By how much these would be late, or one that they push back, at worst.

        Each is to take a share of the time that is left to it. Not above 0: in time. Who will be
        late in any case does not count.
        """
        new = self._new(key, asked)
        own_s = new.ready_s - share * (ends_s - now_s)
        return max(own_s, max(self._pushed_s(new, now_s, share), default=own_s))

    def in_time(
        self, key: LaneKey, asked: Asked, ends_s: float, now_s: float, share: float = 1.0
    ) -> bool:
        """Whether none of those would be late."""
        left_s = share * (ends_s - now_s)
        if self._rounds.place(key)[1] * self._caution > left_s:
            return False  # whatever else there is to do
        new = self._new(key, asked)
        if new.ready_s > left_s:
            return False
        return max(self._pushed_s(new, now_s, share), default=0.0) <= 0

    def wait_s(self, key: LaneKey) -> float:
        """The time until a place is free for one more of this lane, behind those that wait."""
        if key.kind == "search":
            place = self._searching.until_place(key)
            return place.seconds + self._beside_search_s(key, place.calls) if place.calls else 0.0
        busy = self._rounds.busy.get(key)
        return 0.0 if busy is None else self._begin_s(busy)

    def all_begin_s(self) -> float:
        """The time until nobody waits for a place any more."""
        lanes = [busy for busy in self._rounds.busy.values() if busy.lane.waiting]
        if self._searching.idle:
            place = self._rounds.place
            return max([place(one.lane.key)[1] + one.unread_s for one in lanes], default=0.0)
        waits = [*map(self._begin_s, lanes), *map(self.wait_s, self._searching.waiting())]
        return max(waits, default=0.0)

    def waiting_s(self) -> float:
        """The share that those who wait have in it: of what runs already, no more will come."""
        lanes = [busy for busy in self._rounds.busy.values() if busy.lane.waiting]
        searches = map(self.wait_s, self._searching.waiting())
        return max([*map(self._rounds.waiting_s, lanes), *searches], default=0.0)

    def _begin_s(self, busy: Busy[WorkT]) -> float:
        tokens, place_s = self._rounds.place(busy.lane.key)
        if not self._searching.idle:
            place_s += self._searches_s(tokens)
        return place_s + busy.unread_s

    def _new(self, key: LaneKey, asked: Asked) -> _New:
        if key.kind == "search":
            calls = asked.jobs * asked.tokens
            seconds = asked.jobs * self._searched_s(key, asked)
            until = self._searching.until_done(key, asked.tokens, asked.jobs, seconds)
            work_s = until.seconds + self._beside_search_s(key, until.calls)
            ready_s = work_s * self._caution + self._answer_s
            return _New(key.steps, ready_s, calls=calls, each_s=seconds / calls)
        more = more_fixed_s, more_each_s = self._rounds.more(key, asked.jobs)
        fixed_s, each_s = self._rounds.round(key.steps)
        busy, length = self._rounds.busy.get(key), _length(asked)
        if busy is not None and busy.length > length:
            length = busy.length
        round_s = fixed_s + more_fixed_s + (each_s + more_each_s) * length
        tokens, place_s = self._rounds.place(key)
        waves = self._waves(asked)
        read_s = self._read_s(key, asked)
        work_s = place_s + (self._rounds.unread_s + read_s) + waves * round_s
        if not self._searching.idle:
            work_s += self._searches_s(tokens + waves)
        return _New(key.steps, work_s * self._caution + self._answer_s, read_s, more)

    def _pushed_s(self, new: _New, now_s: float, share: float) -> Iterator[float]:
        """By how much others would be late in each lane at worst, where one might be."""
        begin_s, read_s = now_s + self._answer_s, self._rounds.unread_s + new.read_s
        more_fixed_s, more_each_s = new.more
        alone = not new.calls and self._searching.idle
        for busy in self._rounds.busy.values():
            lane, pressing = busy.lane, busy.lane.pressing
            running = [job for job in busy.occupants if job.ends_s < math.inf]
            if not pressing and not running:
                continue
            steps, length = lane.key.steps, busy.length
            fixed_s, each_s = self._rounds.round(steps)
            token_s = fixed_s + each_s * length
            after_s = token_s
            if more_fixed_s or more_each_s:  # not where there is no place for more rows
                often = self._rounds.often(steps, new.steps)
                after_s += often * (more_fixed_s + more_each_s * length)
            # Of those that press, the first ends first and the last has most to write.
            tokens, ends_s = 0, math.inf
            for job in (*running, pressing[0], pressing[-1]) if pressing else running:
                if job.tokens_left > tokens:
                    tokens = job.tokens_left
                if job.ends_s < ends_s:
                    ends_s = job.ends_s
            searches_s = 0.0 if alone else self._searches_s(tokens, new)
            least_s = share * (ends_s - begin_s)
            if (read_s + tokens * after_s + searches_s) * self._caution > least_s:
                yield self._late_in_lane_s(busy, running, new, (token_s, after_s), begin_s, share)
        if not self._searching.idle:
            yield from self._searches_pushed_s(new, begin_s, share)

    def _late_in_lane_s(
        self,
        busy: Busy[WorkT],
        running: list[Job[WorkT]],
        new: _New,
        token_s: tuple[float, float],
        begin_s: float,
        share: float,
    ) -> float:
        """The same in one lane, whose tokens take so long without the new ones and with them."""
        caution, unread_s = self._caution, self._rounds.unread_s
        read_s = unread_s + new.read_s

        def late_s(job: Job[WorkT]) -> float:
            searches_s = self._searches_s(job.tokens_left, new)
            work_s = read_s + job.tokens_left * token_s[1] + searches_s
            return caution * work_s - share * (job.ends_s - begin_s)

        def before_s(job: Job[WorkT]) -> float:
            work_s = unread_s + job.tokens_left * token_s[0] + self._searches_s(job.tokens_left)
            return caution * work_s - (job.ends_s - begin_s)

        if max(map(late_s, running + busy.lane.pressing)) <= 0:
            return 0.0
        jobs = running + busy.lane.next_due
        return max((late_s(job) for job in jobs if before_s(job) <= 0), default=0.0)

    def _searches_pushed_s(self, new: _New, begin_s: float, share: float) -> Iterator[float]:
        """By how much each search would be late that has a deadline and would not be before."""
        more_s = new.more[0] / self._rounds.calls
        for due in self._searching.due():
            calls, seconds = due.until
            before_s = self._caution * (seconds + self._beside_search_s(due.lane, calls))
            if before_s <= due.ends_s - begin_s:
                with_s = min(calls, new.calls) * new.each_s + calls * more_s + new.read_s
                yield before_s + self._caution * with_s - share * (due.ends_s - begin_s)

    def _waves(self, asked: Asked) -> int:
        """Tokens come for all rows that there may be; the first is that of the prompt."""
        return -(-asked.jobs // self._max_rows) * (asked.tokens - 1)

    def _read_s(self, key: LaneKey, asked: Asked) -> float:
        return self._prices.prompts_s(key, asked.jobs * asked.prompt, asked.jobs)

    # Beside searches.

    def _searched_s(self, key: LaneKey, asked: Asked) -> float:
        """All calls of one search."""
        return self._prices.search_s(key, asked.prompt, asked.tokens, asked.beams)

    def _searches_s(self, tokens: float, new: _New | None = None) -> float:
        """What searches take while so many tokens are written, new ones included."""
        seconds = 0.0
        if not self._searching.idle:
            seconds = self._searching.seconds(tokens * self._rounds.calls)
        if new is not None and new.calls:
            seconds += min(new.calls, tokens * self._rounds.calls) * new.each_s
        return seconds

    def _beside_search_s(self, key: LaneKey, calls: float) -> float:
        """What all but this lane of searches takes beside so many calls of it."""
        others_s = self._searching.seconds(calls, but=key) + calls * self._beside_s
        return others_s + self._rounds.unread_s + self._rounds.seconds(calls)


def _length(asked: Asked) -> int:
    """How long each is on average while it is written."""
    return asked.prompt + asked.tokens // 2
