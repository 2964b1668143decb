"""The models of one replica: all that there are can be named, and those that it holds can answer.

Knows names and manifests; deliberately not how models are loaded, nor which is asked for next.
"""

from collections.abc import Iterable, Iterator
from typing import cast

from serve.bundle import Bundle, Task
from serve.catalog import Catalog, InputKind, Served
from serve.errors import ModelGone
from serve.runtime import Model


def card_of(bundle: Bundle) -> Served:
    """A model as its manifest describes it: to be named and listed, never to be run."""
    return Served(bundle, cast(Model, None), None)


class Shelf(Catalog):
    """A catalog in which models stay listed while they are not held."""

    def __init__(self) -> None:
        super().__init__(())
        self._cards: dict[str, Served] = {}

    def stock(self, cards: Iterable[Served]) -> None:
        """From now on these are listed, in this order."""
        self._cards = {card.name: card for card in cards}

    def __iter__(self) -> Iterator[Served]:
        return iter([self.get(name) or card for name, card in self._cards.items()])

    def find(self, name: str) -> Served:
        return self.get(name) or self._cards.get(name) or super().find(name)

    def pick(
        self, name: str | None, tasks: tuple[Task, ...], kind: InputKind | None = None
    ) -> Served:
        picked = super().pick(name, tasks, kind)
        if self.get(picked.name) is None:
            raise ModelGone(f"{picked.name} has just left this replica: send the request again")
        return picked
