"""Rows of one call in as many parts as there are threads, which run side by side.

A session's own threads meet again after every product, often within microseconds, and wait for
each other; parts of a batch meet once. No answer depends on what shares its part. Knows neither
rows nor graphs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import TypeVar, final

from serve.runtime.protocol import RowArray

_LEAST = 2  # rows of a part: one row alone is multiplied otherwise, and its last bits differ
AnswerT = TypeVar("AnswerT")


@final
class Parts:
    """The threads that the rungs of one model take turns with."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._others: ThreadPoolExecutor | None = None  # beside the thread that asks

    def bounds(self, rows: int) -> list[tuple[int, int]]:
        """Where each part of so many rows begins and ends."""
        count = max(1, min(self._most, rows // _LEAST))
        return list(pairwise(rows * part // count for part in range(count + 1)))

    def each(self, call: Callable[[RowArray], AnswerT], rows: RowArray) -> list[AnswerT]:
        """The answers to the parts in their order; raises when all have ended, if one did."""
        if not rows.ndim:
            return [call(rows)]
        return self.run([partial(call, rows[low:high]) for low, high in self.bounds(len(rows))])

    def run(self, calls: Sequence[Callable[[], AnswerT]]) -> list[AnswerT]:
        """What each gives, a call for each part; raises when all have ended, if one did."""
        first, *more = calls
        if not more:
            return [first()]
        if self._others is None:
            self._others = ThreadPoolExecutor(self._most - 1, "rows")
        others = [self._others.submit(call) for call in more]
        try:
            own = first()
        finally:
            wait(others)
        return [own, *(other.result() for other in others)]

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown(wait=False)
            self._others = None
