"""The threads that calls of one model run on beside the one that asks.

Knows neither rows nor graphs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        """The answers to all items, as many at once as there are threads, each the next.

        Raises when all that began have ended, if one did.
        """
        if len(items) == 1:
            return [call(items[0])]
        if self._others is None:
            self._others = ThreadPoolExecutor(self.most - 1, "rows")
        waiting = deque(range(len(items)))
        answers: dict[int, AnswerT] = {}

        def work() -> None:
            while True:
                try:
                    place = waiting.popleft()
                except IndexError:
                    return
                try:
                    answers[place] = call(items[place])
                except BaseException:
                    waiting.clear()
                    raise

        others: list[Future[None]] = []
        try:
            for _ in range(min(self.most, len(items)) - 1):
                others.append(self._others.submit(work))  # may be refused a thread
            work()
        finally:
            waiting.clear()  # nothing is left, unless something failed
            for other in others:
                other.exception()  # waits for its end
        for other in others:
            other.result()
        return [answers[place] for place in range(len(items))]

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown(wait=False)
            self._others = None
