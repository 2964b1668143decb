"""Who may take cache memory next: it goes by age, and never beyond its limit.

It deliberately knows neither turns nor what is kept in the memory.
"""

from collections.abc import Iterator, Mapping
from typing import Generic

from serve.scheduler.generate_lane import GenerateLane
from serve.scheduler.job import LaneKey, WorkT
from serve.scheduler.limits import Limits
from serve.scheduler.search_lane import SearchLane

CachedLane = GenerateLane[WorkT] | SearchLane[WorkT]


class CacheMemory(Generic[WorkT]):
    """The lanes whose jobs hold memory while they run."""

    def __init__(
        self,
        limits: Limits,
        generate: Mapping[LaneKey, GenerateLane[WorkT]],
        search: Mapping[LaneKey, SearchLane[WorkT]],
    ) -> None:
        self._limits = limits
        self._generate, self._search = generate, search

    def __iter__(self) -> Iterator[CachedLane[WorkT]]:
        yield from self._generate.values()
        yield from self._search.values()

    @property
    def charged_bytes(self) -> int:
        """What jobs that run hold, or were promised."""
        return sum(lane.charged_bytes() for lane in self)

    def may_enter(self, lane: CachedLane[WorkT]) -> bool:
        """Whether there is room and memory for the next one of this lane.

        Nobody enters who would take it from an older one that waits for it.
        """
        number = lane.waiting[0].number
        free_bytes = self._limits.cache_bytes - self.charged_bytes - _growth_bytes(lane)
        return (
            self._has_room(lane)
            and free_bytes >= 0
            and not any(
                other.waiting
                and other.waiting[0].number < number
                and self._has_room(other)
                and _growth_bytes(other) > free_bytes
                for other in self
            )
        )

    def _has_room(self, lane: CachedLane[WorkT]) -> bool:
        return len(lane.occupants()) < self._limits.decode_rows


def _growth_bytes(lane: CachedLane[WorkT]) -> int:
    """The memory that the next one of this lane would add."""
    return lane.charged_bytes(lane.waiting[0]) - lane.charged_bytes()
