"""Whether the client of one request has left; told by our own connections.

Knows callbacks; deliberately neither connections nor what is given up when a client leaves.
"""

from collections.abc import Callable

DEPARTURE_KEY = "stepdial.departure"  # in a request's scope, unless another server than ours runs


class Departure:
    """Tells those who watch that the client has left, and those who come later at once."""

    __slots__ = ("_gone", "_watchers")

    def __init__(self) -> None:
        self._gone = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def gone(self) -> bool:
        return self._gone

    def watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Call this when the client leaves; what is returned ends that."""
        if self._gone:
            leave()
            return _nothing
        self._watchers.append(leave)
        return lambda: self._watchers.remove(leave)

    def happen(self) -> None:
        """The client has left."""
        if not self._gone:
            self._gone = True
            for leave in [*self._watchers]:
                leave()


def _nothing() -> None:
    pass
