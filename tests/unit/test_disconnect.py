"""A client that leaves, and those who watch for it."""

from collections.abc import Sequence

from serve.exchange import Exchange, Header, HeaderList


class Connected:
    """A connection of our own server."""

    def take_body(self) -> bytes | None:
        return b""

    def write_whole(
        self, status: int, headers: Sequence[Header], always: HeaderList, body: bytes
    ) -> bool:
        return False


def test_who_watches_is_told_once() -> None:
    told: list[str] = []
    exchange = Exchange(connection=Connected())
    unwatch = exchange.watch(lambda: told.append("first"))
    exchange.watch(lambda: told.append("second"))
    assert told == []
    exchange.leave()
    unwatch()
    exchange.leave()
    assert told == ["first", "second"]


def test_who_comes_after_the_client_has_left_is_told_at_once() -> None:
    told: list[str] = []
    exchange = Exchange(connection=Connected())
    exchange.leave()
    unwatch = exchange.watch(lambda: told.append("late"))
    assert told == ["late"]
    unwatch()


def test_who_has_stopped_watching_is_not_told() -> None:
    told: list[str] = []
    exchange = Exchange(connection=Connected())
    unwatch = exchange.watch(lambda: told.append("gone before"))
    exchange.watch(lambda: told.append("stayed"))
    unwatch()
    exchange.leave()
    assert told == ["stayed"]
