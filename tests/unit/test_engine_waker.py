"""The engine's thread is woken once for all that comes in a turn of an event loop."""

import threading
from collections.abc import Callable

from serve.engine.engine import EngineWaker


class Counted(threading.Condition):
    """Counts how often somebody is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes = 0

    def notify(self, n: int = 1) -> None:
        self.wakes += 1
        super().notify(n)


def test_it_wakes_at_once_where_there_is_no_loop() -> None:
    condition = Counted()
    waker = EngineWaker(condition)
    waker.ask()
    waker.ask()
    assert condition.wakes == 2


def test_it_wakes_once_for_what_comes_before_the_turn_ends() -> None:
    condition = Counted()
    turn: list[Callable[[], None]] = []
    waker = EngineWaker(condition)
    waker.soon = turn.append
    waker.ask()
    waker.ask()
    assert condition.wakes == 0 and len(turn) == 1
    turn.pop()()
    assert condition.wakes == 1
    waker.ask()
    assert len(turn) == 1  # what comes later is not forgotten
