"""A client that leaves, and those who watch for it."""

from serve.api.submission import Departure


def test_who_watches_is_told_once() -> None:
    told: list[str] = []
    departure = Departure()
    unwatch = departure.watch(lambda: told.append("first"))
    departure.watch(lambda: told.append("second"))
    assert told == []
    departure.happen()
    unwatch()
    departure.happen()
    assert told == ["first", "second"]


def test_who_comes_after_the_client_has_left_is_told_at_once() -> None:
    told: list[str] = []
    departure = Departure()
    departure.happen()
    unwatch = departure.watch(lambda: told.append("late"))
    assert told == ["late"]
    unwatch()


def test_who_has_stopped_watching_is_not_told() -> None:
    told: list[str] = []
    departure = Departure()
    unwatch = departure.watch(lambda: told.append("gone before"))
    departure.watch(lambda: told.append("stayed"))
    unwatch()
    departure.happen()
    assert told == ["stayed"]
