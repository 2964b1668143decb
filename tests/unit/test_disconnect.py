"""A client that leaves, and those who watch for it."""

from serve.api.submission import Disconnect


def test_who_watches_is_told_once() -> None:
    told: list[str] = []
    disconnect = Disconnect()
    unwatch = disconnect.watch(lambda: told.append("first"))
    disconnect.watch(lambda: told.append("second"))
    assert told == []
    disconnect.happen()
    unwatch()
    disconnect.happen()
    assert told == ["first", "second"]


def test_who_comes_after_the_client_has_left_is_told_at_once() -> None:
    told: list[str] = []
    disconnect = Disconnect()
    disconnect.happen()
    unwatch = disconnect.watch(lambda: told.append("late"))
    assert told == ["late"]
    unwatch()


def test_who_has_stopped_watching_is_not_told() -> None:
    told: list[str] = []
    disconnect = Disconnect()
    unwatch = disconnect.watch(lambda: told.append("gone before"))
    disconnect.watch(lambda: told.append("stayed"))
    unwatch()
    disconnect.happen()
    assert told == ["stayed"]
