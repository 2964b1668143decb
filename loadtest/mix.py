"""The mix: which requests are sent and in which proportions.

A mix is a comma-separated list of `endpoint[@model]:budget=weight`. The budget is a step count,
`*` for every rung, or any other that loadtest/target.py reads; without a model, every model of that
endpoint that has the rung takes part. The weight is the item's share of all requests, divided
equally among the models and rungs that it covers.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.target import ENDPOINTS, Ask, Offer, parse_ask

_ITEM = re.compile(
    r"(?P<endpoint>[a-z-]+)(?:@(?P<model>[^:=,]+))?:(?P<ask>\*|[^:=,]+)(?:=(?P<weight>[0-9.]+))?"
)
SYNTAX = (
    "endpoint[@model]:budget=weight, such as generate:1=2,generate-whole:low=1,classify@topics:4=3"
)


class MixError(ValueError):
    """The mix cannot be sent to this server; the text says what to write instead."""


@dataclass(frozen=True, slots=True)
class MixItem:
    """One item of a mix as it was written."""

    endpoint: str
    model: str | None
    ask: Ask | None  # None: every rung
    weight: float


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of request; results are reported for each."""

    endpoint: str
    model: str
    ask: Ask

    def __str__(self) -> str:
        return f"{self.endpoint} {self.model} {self.ask}"

    @property
    def place(self) -> tuple[str, str, tuple[float, str]]:
        """Where it stands in a table."""
        return self.endpoint, self.model, self.ask.place

    def to_wire(self) -> dict[str, Any]:
        """As plain data, to be sent between the processes of a distributed test."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "Operation":
        """The inverse of `to_wire`."""
        return cls(data["endpoint"], data["model"], Ask(**data["ask"]))


def parse_mix(text: str) -> list[MixItem]:
    """The items of a mix, in order."""
    items = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise MixError(f"{item!r} is no item of a mix. Write {SYNTAX}.")
        if match["endpoint"] not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            raise MixError(f"{item!r} names no endpoint: there are {known}.")
        try:
            weight = float(match["weight"] or 1)
        except ValueError:
            weight = 0.0
        if weight <= 0:
            raise MixError(f"The weight of {item!r} must be a number above 0.")
        try:
            ask = None if match["ask"] == "*" else parse_ask(match["ask"])
        except ValueError as error:
            raise MixError(f"{item!r} is no item of a mix: {error}.") from None
        items.append(MixItem(match["endpoint"], match["model"], ask, weight))
    if not items:
        raise MixError(f"The mix is empty. Write {SYNTAX}.")
    return items


def resolve_mix(text: str | None, offers: Sequence[Offer]) -> dict[Operation, float]:
    """The weight of every operation; without a text, every rung of every model equally."""
    if text is None:
        return {
            Operation(offer.task, offer.model, Ask(steps)): 1.0
            for offer in offers
            for steps in offer.steps
        }
    weights: dict[Operation, float] = {}
    for item in parse_mix(text):
        covered = _covered(item, offers)
        for operation in covered:
            weights[operation] = weights.get(operation, 0.0) + item.weight / len(covered)
    return weights


def _covered(item: MixItem, offers: Sequence[Offer]) -> list[Operation]:
    task = ENDPOINTS[item.endpoint].task
    fitting = [
        offer for offer in offers if offer.task == task and item.model in (None, offer.model)
    ]
    if not fitting:
        known = ", ".join(f"{offer.task}@{offer.model}" for offer in offers)
        wanted = item.endpoint + (f"@{item.model}" if item.model else "")
        raise MixError(f"The server has no model for {wanted}. It has: {known}.")
    covered = [
        Operation(item.endpoint, offer.model, ask)
        for offer in fitting
        for ask in ([item.ask] if item.ask else map(Ask, offer.steps))
        if offer.has(ask)
    ]
    if not covered:
        ladders = "; ".join(f"{offer.model}: {_listed(offer.steps)}" for offer in fitting)
        lacked = f"{item.ask.steps} steps" if item.ask and item.ask.steps else str(item.ask)
        raise MixError(f"No model for {item.endpoint} has {lacked}. Step counts: {ladders}.")
    return covered


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


class RoundRobin:
    """Operations in turn, for ever: in exact proportion, in shuffled order.

    Pure chance would leave rungs unvisited in a short test, and a fixed order would never let
    two callers ask for the same rung at the same time, as real ones do.
    """

    def __init__(self, weights: dict[Operation, float], seed: int = 0) -> None:
        if not weights:
            raise MixError("There is nothing to send.")
        # By position, since a long schedule would take most of its time to hash operations.
        self._operations = [*weights]
        self._weights = [*weights.values()]
        self._total = sum(self._weights)
        self._credit = [0.0] * len(weights)
        self._random = random.Random(seed)
        self._round: list[Operation] = []

    def next(self) -> Operation:
        """The operation whose turn it is."""
        if not self._round:
            self._round = [self._draw() for _ in range(4 * len(self._weights))]
            self._random.shuffle(self._round)
        return self._round.pop()

    def _draw(self) -> Operation:
        for at, weight in enumerate(self._weights):
            self._credit[at] += weight
        turn = self._credit.index(max(self._credit))
        self._credit[turn] -= self._total
        return self._operations[turn]
