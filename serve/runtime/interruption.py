"""What the engine asks of a runtime when a call takes too long.

Knows neither what a call is nor how long it may take.
"""

from typing import Protocol


class Interruptible(Protocol):
    """A model whose calls can be ended from outside."""

    @property
    def opening(self) -> bool:
        """Whether the call that runs is opening a graph, which may take long."""
        ...

    def interrupt(self) -> None:
        """From any thread: let the call that runs throw as soon as it can, and all after it."""
        ...

    def resume(self) -> None:
        """What was interrupted is over: calls run again."""
        ...
