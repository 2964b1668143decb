"""Wakes the engine's thread once for all the requests that come in one turn of an event loop.

A thread that is woken for each of them takes the interpreter from the loop for each, and finds
them one by one. Knows a condition and how to run something a little later; deliberately no loop.
"""

import threading
from collections.abc import Callable
from typing import Any

Soon = Callable[[Callable[[], None]], Any]


class Waking:
    """Wakes at once, until it is told what runs things at the end of a turn."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._soon: Soon | None = None
        self._asked = False

    def through(self, soon: Soon) -> None:
        """From now on `soon(function)` wakes, and is called only where requests are submitted."""
        self._soon = soon

    def ask(self) -> None:
        """There is something to do."""
        if self._soon is None:
            self._wake()
        elif not self._asked:
            self._asked = True
            self._soon(self._wake)

    def _wake(self) -> None:
        self._asked = False
        with self._condition:
            self._condition.notify()
