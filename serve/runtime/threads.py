"""The threads that calls of one model run on beside the one that asks.

Knows neither rows nor graphs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar, final

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")


@final
class Threads:
    """As many as there may be at once, the one that asks among them; started when first needed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._others: ThreadPoolExecutor | None = None

    def each(self, call: Callable[[ItemT], AnswerT], items: Sequence[ItemT]) -> list[AnswerT]:
        """The answers to all items, at once; raises when all have ended, if one did."""
        first, *more = items
        if not more:
            return [call(first)]
        if self._others is None:
            self._others = ThreadPoolExecutor(self.most - 1, "rows")
        others: list[Future[AnswerT]] = []
        try:
            for item in more:
                others.append(self._others.submit(call, item))  # may be refused a thread
            own = call(first)
        finally:
            wait(others)
        return [own, *(other.result() for other in others)]

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown(wait=False)
            self._others = None
