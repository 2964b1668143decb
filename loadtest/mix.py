"""The mix: which requests are sent, in which proportions, as text and as an endless rota.

A mix is a comma-separated list of `endpoint[@model]:steps=weight`. Steps may be `*` for every
rung; without a model, every model of that endpoint that has the rung takes part. The weight is
the share of all requests that the item stands for, divided equally among what it covers.
It deliberately knows nothing of HTTP.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.target import ENDPOINTS, Offer

_ITEM = re.compile(
    r"(?P<endpoint>[a-z]+)(?:@(?P<model>[^:=,]+))?:(?P<steps>\*|[0-9]+)(?:=(?P<weight>[0-9.]+))?"
)
SYNTAX = "endpoint[@model]:steps=weight, such as generate:1=2,generate:8=1,classify@topics:4=3"


class MixError(ValueError):
    """The mix cannot be sent to this server; the text says what to write instead."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One item of a mix as it was written."""

    endpoint: str
    model: str | None
    steps: int | None  # None: every rung
    weight: float


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of request; results are reported for each."""

    endpoint: str
    model: str
    steps: int

    def __str__(self) -> str:
        return f"{self.endpoint} {self.model} steps={self.steps}"


def parse_mix(text: str) -> list[Wish]:
    """The items of a mix, in order."""
    wishes = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise MixError(f"{item!r} is no item of a mix. Write {SYNTAX}.")
        if match["endpoint"] not in ENDPOINTS:
            known = " and ".join(ENDPOINTS)
            raise MixError(f"{item!r} names no endpoint: there are {known}.")
        try:
            weight = float(match["weight"] or 1)
        except ValueError:
            weight = 0.0
        if weight <= 0:
            raise MixError(f"The weight of {item!r} must be a number above 0.")
        steps = None if match["steps"] == "*" else int(match["steps"])
        wishes.append(Wish(match["endpoint"], match["model"], steps, weight))
    if not wishes:
        raise MixError(f"The mix is empty. Write {SYNTAX}.")
    return wishes


def resolve_mix(text: str | None, offers: Sequence[Offer]) -> dict[Operation, float]:
    """The weight of every operation; without a text, every rung of every model equally."""
    if text is None:
        return {
            Operation(offer.task, offer.model, steps): 1.0
            for offer in offers
            for steps in offer.steps
        }
    weights: dict[Operation, float] = {}
    for wish in parse_mix(text):
        covered = _covered(wish, offers)
        for operation in covered:
            weights[operation] = weights.get(operation, 0.0) + wish.weight / len(covered)
    return weights


def _covered(wish: Wish, offers: Sequence[Offer]) -> list[Operation]:
    fitting = [
        offer
        for offer in offers
        if offer.task == wish.endpoint and wish.model in (None, offer.model)
    ]
    if not fitting:
        known = ", ".join(f"{offer.task}@{offer.model}" for offer in offers)
        asked = wish.endpoint + (f"@{wish.model}" if wish.model else "")
        raise MixError(f"The server has no model for {asked}. It has: {known}.")
    covered = [
        Operation(offer.task, offer.model, steps)
        for offer in fitting
        for steps in offer.steps
        if wish.steps in (None, steps)
    ]
    if not covered:
        ladders = "; ".join(f"{offer.model}: {_listed(offer.steps)}" for offer in fitting)
        raise MixError(f"No model for {wish.endpoint} has {wish.steps} steps. Ladders: {ladders}.")
    return covered


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


class Rota:
    """Deals operations out for ever: in exact proportion, in shuffled order.

    Pure chance would leave rungs unvisited in a short test, and a fixed order would never let
    two callers ask for the same rung at the same time, as real ones do.
    """

    def __init__(self, weights: dict[Operation, float], seed: int = 0) -> None:
        if not weights:
            raise MixError("There is nothing to send.")
        self._weights = dict(weights)
        self._total = sum(weights.values())
        self._credit = dict.fromkeys(weights, 0.0)
        self._random = random.Random(seed)
        self._hand: list[Operation] = []

    def deal(self) -> Operation:
        """The operation whose turn it is."""
        if not self._hand:
            self._hand = [self._draw() for _ in range(4 * len(self._weights))]
            self._random.shuffle(self._hand)
        return self._hand.pop()

    def _draw(self) -> Operation:
        for operation, weight in self._weights.items():
            self._credit[operation] += weight
        turn = max(self._credit, key=lambda operation: self._credit[operation])
        self._credit[turn] -= self._total
        return turn
