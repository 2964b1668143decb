"""The generations of one model: whose prompt is read, and which rungs decode in the next call.

Rungs of one model may share calls of its one-step graph, or go abreast, each on a thread of its own
until all meet again. A row of M steps needs M calls for a token, so turns of equal number would
make the many steps slow, and a token for every row in turn would make the few steps wait for the
many. Between the two, a rung of M steps has a token ready about sqrt(L / M) times as often as the
longest rung there is, of L steps; where a call has room left, the others come along as well. Those
that go abreast have no such room, and there it is the cube root. It deliberately knows neither
memory nor other models.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import DecodeCall, DecodePart, LaneKey, Sharing, WorkT

_MEETINGS = 2  # of those that go abreast while the longest rung makes a token
_BESIDE_ROWS = 1  # what a call costs beside its rows, in rows
_ABREAST_SHARE = 2 / 3  # calls of M steps are made in proportion to M to the power of this


class Decoding(Generic[WorkT]):
    """The lanes of one model. Each is due again after as many calls as its share allows."""

    def __init__(self, most_lanes: int, sides: int) -> None:
        self.most_lanes = most_lanes  # that may share a call
        self.sides = sides  # that may go abreast
        self.sharing: Sharing = "together" if most_lanes > 1 else "turns"
        self._lanes: dict[LaneKey, GenerateLane[WorkT]] = {}
        self._readers: deque[GenerateLane[WorkT]] = deque()
        self._calls = 0.0
        self._active: list[GenerateLane[WorkT]] = []

    def __iter__(self) -> Iterator[GenerateLane[WorkT]]:
        return iter(self._lanes.values())

    def open(self, lane: GenerateLane[WorkT]) -> None:
        self._lanes[lane.key] = lane
        self._readers.append(lane)

    def readers(self) -> Iterator[GenerateLane[WorkT]]:
        """The lanes in the order in which they may read; the last one asked goes to the end."""
        for _ in range(len(self._readers)):
            self._readers.rotate(-1)
            yield self._readers[-1]

    def share(self, sharing: Sharing) -> None:
        """How the cores are shared from now on; what a lane was ahead in another way is over."""
        if sharing != self.sharing:
            self.sharing = sharing
            self._calls = min((lane.due for lane in self._lanes.values()), default=self._calls)
            for lane in self._lanes.values():
                lane.due = self._calls

    def decode(self, most_rows: int) -> DecodeCall[WorkT] | None:
        """The next call for the rows there are."""
        lanes = [lane for lane in self._lanes.values() if not lane.idle]
        self._activate(lanes)
        if not lanes:
            return None
        dead = [lane for lane in lanes if lane.dead]
        if dead:
            return DecodeCall(tuple(lane.lose() for lane in dead))
        if len(lanes) == 1 and lanes[0].calls == 0:
            return DecodeCall((lanes[0].token(),))
        if self.sharing == "turns":
            return DecodeCall((self._turn(lanes),), len(lanes) > 1)
        if self.sharing == "abreast" and len(lanes) > 1:
            return DecodeCall(self._abreast(lanes), contended=True, abreast=True)
        longest = max(lane.calls_a_token for lane in lanes)
        chosen = self._fitting(lanes, most_rows)
        latest = _latest(lanes[0], longest)
        for lane in chosen:
            lane.due = min(lane.due + 1 / _share(lane.calls_a_token, longest), latest)
        self._calls += 1
        return DecodeCall(tuple(lane.part() for lane in chosen), len(lanes) > 1)

    def _turn(self, lanes: list[GenerateLane[WorkT]]) -> DecodePart[WorkT]:
        """A whole token of the lane that has waited longest, once none is under way any more."""
        first = min(lanes, key=lambda lane: (lane.calls == 0, lane.due))
        if first.calls:
            return first.part()
        first.due += 1
        return first.token()

    def _abreast(self, lanes: list[GenerateLane[WorkT]]) -> tuple[DecodePart[WorkT], ...]:
        """As many calls of each as fill all sides alike, longest due first."""
        lanes.sort(key=lambda lane: lane.due)
        self._calls = max(self._calls, lanes[0].due)
        longest = max(lane.calls_a_token for lane in lanes)
        latest = _latest(lanes[0], longest)
        most = max(1, longest // _MEETINGS)
        wanted = [min(most, lane.calls_a_token - lane.calls) for lane in lanes]
        costs = [len(lane.rows) + len(lane.joining) + _BESIDE_ROWS for lane in lanes]
        room = max(calls * cost for calls, cost in zip(wanted, costs, strict=True))
        rooms = [room] * min(self.sides, len(lanes))
        parts = []
        for lane, calls, cost in zip(lanes, wanted, costs, strict=True):
            side = rooms.index(max(rooms))
            calls = min(calls, rooms[side] // cost)
            if calls:
                rooms[side] -= calls * cost
                due = lane.due + calls / (lane.calls_a_token / longest) ** _ABREAST_SHARE
                lane.due = min(due, latest)
                parts.append(lane.part(calls, side))
        return tuple(parts)

    def _activate(self, lanes: list[GenerateLane[WorkT]]) -> None:
        """Whoever has come since is due now, as much as those that are here."""
        if lanes == self._active:
            return
        here = [lane for lane in lanes if lane in self._active]
        now = min((lane.due for lane in here), default=self._calls)
        for lane in lanes:
            if lane not in here:
                lane.due = min(now, self._calls)
        self._active = list(lanes)

    def _fitting(
        self, lanes: list[GenerateLane[WorkT]], most_rows: int
    ) -> list[GenerateLane[WorkT]]:
        """Those that fit into a call, longest due first; one at least."""
        lanes.sort(key=lambda lane: lane.due)
        self._calls = max(self._calls, lanes[0].due)
        chosen: list[GenerateLane[WorkT]] = []
        rows = 0
        for lane in lanes:
            more = len(lane.rows) + len(lane.joining)
            if not chosen or (rows + more <= most_rows and len(chosen) < self.most_lanes):
                chosen.append(lane)
                rows += more
        return chosen


def _latest(first: GenerateLane[WorkT], longest: int) -> float:
    """When a lane is due at the latest, where this one is due first.

    What there was room for beyond its share is not held against it: no lane is ever further ahead
    than a token of the longest.
    """
    return first.due + longest


def _share(calls: int, longest: int) -> float:
    """The share of shared calls that rows of so many calls a token are due in.

    Rounded up to whole tokens, so that rungs meet at the same steps again.
    """
    tokens = min(math.ceil(math.sqrt(longest / calls)), longest // calls)
    return tokens * calls / longest
