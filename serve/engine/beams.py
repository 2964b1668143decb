"""Beam search: several translations at a time, of which the likeliest a token wins.

The next token is one of all but the banned ones, and its log-probability is over those. Each round
ranks what continues the live hypotheses by the sum of its log-probabilities, equal ones by the rank
of what they continue, then by the lower token. Of the first W, those that end are finished, until
there are W; the first W that do not end live on. The answer is the finished hypothesis of the
greatest mean log-probability a token, its end counted; the first live one if none is finished.

Knows logits and tokens; deliberately neither models nor text.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve.engine.sampling import log_softmax
from serve.runtime.protocol import FloatArray


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A translation, whole or not; its tokens are without the beginning, and with the end."""

    tokens: tuple[int, ...]
    total: float  # sum of log-probabilities

    @property
    def score(self) -> float:
        return self.total / len(self.tokens)


class Beams:
    """The live hypotheses of one search, all of one length, and those that are finished."""

    def __init__(
        self, width: int, max_tokens: int, bos_id: int, eos_id: int, banned: tuple[int, ...] = ()
    ) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._bos_id = bos_id
        self._eos_id = eos_id
        self._banned = list(banned)
        self._live = [Hypothesis((), 0.0)]
        self._finished: list[Hypothesis] = []

    @property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """What to run next (B, N), bos included."""
        return np.array([(self._bos_id, *one.tokens) for one in self._live], dtype=np.int64)

    @property
    def over(self) -> bool:
        """Whether nothing is left to run."""
        return (
            not self._live
            or len(self._finished) >= self._width
            or len(self._live[0].tokens) >= self._max_tokens
        )

    @property
    def best(self) -> Hypothesis:
        """The answer, once the search is over."""
        if self._finished:
            return max(self._finished, key=lambda one: one.score)  # the first of equal ones
        return self._live[0]

    def grow(self, logits: FloatArray) -> None:
        """Take the logits (B, V) after each prefix, and keep the likeliest continuations."""
        allowed = logits.astype(np.float64)  # (B, V)
        allowed[:, self._banned] = -np.inf
        # Each live hypothesis ends in one way only, so twice the width leaves enough that go on.
        ranked = self._ranked(log_softmax(allowed), 2 * self._width)
        for one in ranked[: self._width]:
            if one.tokens[-1] == self._eos_id and len(self._finished) < self._width:
                self._finished.append(one)
        self._live = [one for one in ranked if one.tokens[-1] != self._eos_id][: self._width]

    def _ranked(self, scores: npt.NDArray[np.float64], count: int) -> list[Hypothesis]:
        """The best `count` continuations, given log-probabilities (B, V) of the next token."""
        totals = (scores + np.array([[one.total] for one in self._live])).ravel()  # (B * V,)
        count = min(count, len(totals))
        least = np.partition(totals, len(totals) - count)[len(totals) - count]
        places = np.flatnonzero(totals >= least)  # ascending: the order of equal ones
        order = places[np.argsort(-totals[places], kind="stable")][:count]
        return [
            Hypothesis((*self._live[row].tokens, token), float(totals[place]))
            for place in order.tolist()
            if totals[place] > -np.inf
            for row, token in [divmod(place, scores.shape[1])]
        ]
