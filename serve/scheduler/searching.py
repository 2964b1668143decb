"""What beam searches of one model take: those that wait, those that run, and one that may come.

Each call takes one search of a lane one token further, and they go in turn. It deliberately knows
nothing of what runs beside these lanes: that is told in seconds, or asked for in calls.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, NamedTuple

from serve.scheduler.job import Job, LaneKey, WorkT
from serve.scheduler.search_lane import SearchLane
from serve.scheduler.writing_prices import WritingPrices


class Share(NamedTuple):
    """Calls of one lane, and the time that they take."""

    calls: float
    seconds: float


class DueSearch(NamedTuple):
    """A search with a deadline, and what its lane does until it has its answer."""

    lane: LaneKey
    left: int  # calls of its own
    until: Share
    ends_s: float


class _Search(NamedTuple):
    left: int  # calls
    each_s: float
    ends_s: float


class _Lane(NamedTuple):
    searches: list[_Search]  # those that run, then those that wait
    running: int
    all: Share


class Searching(Generic[WorkT]):
    """Predicts for one moment, like an outlook."""

    def __init__(
        self,
        lanes: Iterable[SearchLane[WorkT]],
        prices: WritingPrices,
        max_rows: int,
    ) -> None:
        self._prices = prices
        self._max_rows = max_rows
        self._lanes: dict[LaneKey, _Lane] = {}
        for lane in lanes:
            searches = [self._search(job) for job in (*lane.running, *lane.waiting)]
            if searches:
                calls = sum(one.left for one in searches)
                seconds = sum(one.left * one.each_s for one in searches)
                self._lanes[lane.key] = _Lane(searches, len(lane.running), Share(calls, seconds))
        self.idle = not self._lanes

    def seconds(self, calls: float, but: LaneKey | None = None) -> float:
        """What lanes take, all but one, while something beside them has so many turns."""
        return sum(
            lane.all.seconds * min(1.0, calls / lane.all.calls)
            for key, lane in self._lanes.items()
            if key != but
        )

    def until_done(self, key: LaneKey, tokens: int, jobs: int, seconds: float) -> Share:
        """What this lane does until so many more searches of so many tokens are over."""
        lane = self._lanes.get(key)
        calls = jobs * tokens
        if lane is None:
            return Share(calls, seconds)
        # Who runs beside them has as many calls as they; who waits ahead of them has all.
        together = len(lane.searches) + jobs <= self._max_rows
        ahead = _within(lane.searches, tokens) if together else lane.all
        return Share(ahead.calls + calls, ahead.seconds + seconds)

    def until_place(self, key: LaneKey) -> Share:
        """What this lane does until there is a place for one more, behind those that wait."""
        lane = self._lanes.get(key)
        behind = 0 if lane is None else len(lane.searches) - self._max_rows
        if lane is None or behind < 0:
            return Share(0, 0.0)
        if behind >= lane.running:
            return lane.all
        # Whoever is done until then has others in its place.
        left = sorted(one.left for one in lane.searches[: lane.running])[behind]
        calls = min(lane.all.calls, left * self._max_rows)
        return Share(calls, lane.all.seconds * calls / lane.all.calls)

    def waiting(self) -> list[LaneKey]:
        """The lanes in which a search waits for a place."""
        return [key for key, lane in self._lanes.items() if len(lane.searches) > lane.running]

    def due(self) -> Iterator[DueSearch]:
        """The searches with a deadline among those that run or are next."""
        for key, lane in self._lanes.items():
            calls, seconds = 0, 0.0
            for place, one in enumerate(islice(lane.searches, 2 * self._max_rows)):
                calls, seconds = calls + one.left, seconds + one.left * one.each_s
                if one.ends_s < math.inf:
                    runs = place < self._max_rows
                    until = self._until(lane, place) if runs else Share(calls, seconds)
                    yield DueSearch(key, one.left, until, one.ends_s)

    def _search(self, job: Job[WorkT]) -> _Search:
        key, left, beams = job.lane, job.tokens_left, job.beams
        if left < job.most_tokens:
            each_s = self._prices.search_call_s(key, beams, job.most_tokens - left // 2)
        else:
            each_s = self._prices.search_s(key, job.lengths[0], left, beams) / max(1, left)
        return _Search(max(1, left), each_s, job.ends_s)

    def _until(self, lane: _Lane, place: int) -> Share:
        """What the lane does until one of those that have a place is done."""
        left = lane.searches[place].left
        along = lane.searches[: self._max_rows]
        if len(lane.searches) <= self._max_rows:
            return _within(along, left)
        # Whoever is done has others in its place.
        return Share(left * len(along), left * sum(one.each_s for one in along))


def _within(searches: Iterable[_Search], calls: int) -> Share:
    """What these do while each has so many calls, or all that it needs."""
    counted = [(min(one.left, calls), one.each_s) for one in searches]
    return Share(sum(count for count, _ in counted), sum(count * s for count, s in counted))
