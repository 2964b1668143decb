"""What is sent in one test, in which order, and what has come of it so far.

It deliberately knows nothing of Locust, gevent and sockets.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.mix import Operation, Rota, resolve_mix
from loadtest.outcomes import Outcome, elapsed_s, group_failures, summarise
from loadtest.report import Report
from loadtest.target import Offer
from loadtest.texts import PROMPTS, TEXTS

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_MAX_TOKENS = 64
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What the person who runs the test can choose about its requests."""

    url: str = DEFAULT_URL
    mix: str = ""  # empty: every rung of every model equally
    max_tokens: int = DEFAULT_MAX_TOKENS
    timeout_s: float = DEFAULT_TIMEOUT_S  # of silence, before a request counts as failed


class Plan:
    """Deals out requests to the callers, and collects what they saw."""

    def __init__(self, terms: Terms, offers: Sequence[Offer]) -> None:
        self.terms = terms
        self.outcomes: list[Outcome] = []
        self._offers = {offer.model: offer for offer in offers}
        self._weights = resolve_mix(terms.mix or None, offers)
        self._rota = Rota(self._weights)
        self._turns = itertools.count()

    def next_request(self) -> tuple[Operation, dict[str, Any]]:
        """The operation whose turn it is, and the body that asks for it."""
        operation, turn = self._rota.deal(), next(self._turns)
        offer = self._offers[operation.model]
        body: dict[str, Any] = {"model": operation.model, "steps": operation.steps}
        if operation.endpoint == "classify":
            texts = offer.examples or TEXTS
            body["input"] = texts[turn % len(texts)]
        else:
            body |= {"prompt": _fitting_prompt(offer, turn), "stream": True, "seed": turn}
            body["max_tokens"] = self.terms.max_tokens
        return operation, body

    def report(self, users: int) -> Report:
        """The test so far."""
        return Report(
            url=self.terms.url,
            users=users,
            mix=self.terms.mix or "every rung of every model equally",
            elapsed_s=elapsed_s(self.outcomes),
            rows=summarise(self.outcomes, self._weights),
            failures=group_failures(self.outcomes),
        )


def _fitting_prompt(offer: Offer, turn: int) -> str:
    prompts = offer.examples or PROMPTS
    prompt = prompts[turn % len(prompts)]
    # A character is at least as much as a token, so half the window is left for the answer.
    return prompt if offer.max_tokens is None else prompt[: max(offer.max_tokens // 2, 1)]
