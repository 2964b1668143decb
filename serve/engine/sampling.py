"""From the logits of one position to one token: sampling, likelihoods, beam search.

A token is the argmax of filtered log-probabilities plus Gumbel noise that depends on the seed and
the number of the token only, so a seed gives the same tokens whatever shares the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve.runtime.protocol import FloatArray

ScoreArray = npt.NDArray[np.float64]

MAX_SEED = 2**63 - 1
_TINY = float(np.finfo(np.float64).tiny)
_COLDEST = 1e-260  # like any lower temperature, and no float32 overflows


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: temperature, then the k likeliest, then the likeliest p of the rest."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probabilities under the model: no temperature, no filter, no noise."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), likeliest first


class Sampler:
    """Samples the tokens of one generation."""

    def __init__(self, sampling: Sampling, banned_tokens: tuple[int, ...] = ()) -> None:
        self.sampling = sampling
        self.banned = banned_tokens
        self.filters = sampling.top_k is not None or sampling.top_p < 1.0
        self.temperature = sampling.temperature and max(_COLDEST, sampling.temperature)
        # The counter is set for each token, so the state carries no history.
        self._bits = np.random.Philox(key=sampling.seed)
        self._state = self._bits.state
        self._uniform = np.random.Generator(self._bits)
        # From the last call of choose_following: the noise (P, V) from this token number on.
        self._noise: tuple[int, ScoreArray] = (0, np.empty((0, 0)))

    def choose(self, logits: FloatArray, number: int) -> int:
        """The token for logits (V,), as token `number` of the answer."""
        return choose_tokens([self], logits[None], [number])[0]

    def choose_following(self, logits: FloatArray, first: int) -> list[int]:
        """The tokens for logits (P, V), as tokens `first` onwards.

        The same as `choose`, and faster where most were asked for before.
        """
        scores = logits.astype(np.float64)  # (P, V)
        _rule_out(scores, self.banned)
        if self.temperature > 0:
            noise = self._noise_from(first, len(scores), scores.shape[1])
            scores = _add_noise([self] * len(scores), scores, self.temperature, noise)
        chosen: list[int] = scores.argmax(axis=1).tolist()
        return chosen

    def _noise_from(self, first: int, count: int, size: int) -> ScoreArray:
        """Noise (P, V) of the tokens from this number on; most is known from the last call."""
        begun, known = self._noise
        if not begun <= first <= begun + len(known):
            begun, known = first, known[:0]
        unwanted = max(0, first - 1 - begun)  # the token before may be asked for again
        begun, known = begun + unwanted, known[unwanted:]
        numbers = range(begun + len(known), first + count)
        if numbers:
            new = _draw_noise([self] * len(numbers), numbers, size)
            known = np.concatenate([known, new]) if len(known) else new
        self._noise = begun, known
        return known[first - begun : first - begun + count]

    def keep_likeliest(self, scores: ScoreArray) -> None:
        """Rule out all but the likeliest of these scores (V,), whose maximum is 0."""
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        if top_k is not None and top_k < scores.size:
            # Stable: of equal scores the lower token stays, as with argmax.
            order = np.argsort(-scores, kind="stable")
            scores[order[top_k:]] = -np.inf
        if top_p < 1.0:
            order = np.argsort(-scores, kind="stable")
            probabilities = np.exp(scores[order])
            probabilities /= probabilities.sum()
            # A token stays while those before it have not reached p; the likeliest always does.
            before = np.cumsum(probabilities) - probabilities
            scores[order[before >= top_p]] = -np.inf

    def fill_uniform(self, number: int, row: ScoreArray) -> None:
        """Uniform numbers (V,) for one token: a function of (seed, number)."""
        state = self._state
        state["state"]["counter"][:] = (0, number, 0, 0)
        state["buffer_pos"] = 4  # nothing left over from another token
        state["has_uint32"] = 0
        self._bits.state = state
        self._uniform.random(out=row)


def choose_tokens(
    samplers: Sequence[Sampler], logits: FloatArray, numbers: Sequence[int]
) -> list[int]:
    """The token of each row of logits (B, V), as token of this number of its answer.

    All rows at once, since a call for each would take longer than small models do. A row's token
    does not depend on other rows.
    """
    if not samplers:  # no row has finite logits
        return []
    if len(samplers) == 1:
        return samplers[0].choose_following(logits, numbers[0])
    scores = logits.astype(np.float64)  # (B, V)
    banned = samplers[0].banned
    if all(one.banned == banned for one in samplers):  # rows of one model have the same
        _rule_out(scores, banned)
    else:
        for row, sampler in zip(scores, samplers, strict=True):
            _rule_out(row[None], sampler.banned)
    drawn = [index for index, one in enumerate(samplers) if one.temperature > 0]
    if drawn:
        scores[drawn] = _draw(
            [samplers[index] for index in drawn], scores[drawn], [numbers[index] for index in drawn]
        )
    chosen: list[int] = scores.argmax(axis=1).tolist()
    return chosen


def _rule_out(scores: ScoreArray, tokens: Sequence[int]) -> None:
    """Give these few tokens the lowest scores (B, V)."""
    for token in tokens:
        scores[:, token] = -np.inf


def _draw(samplers: Sequence[Sampler], scores: ScoreArray, numbers: Sequence[int]) -> ScoreArray:
    """Scores (B, V) whose argmax is a sample from the distribution of these scores (B, V)."""
    temperatures = np.array([[one.temperature] for one in samplers])  # (B, 1)
    noise = _draw_noise(samplers, numbers, scores.shape[1])
    return _add_noise(samplers, scores, temperatures, noise)


def _draw_noise(samplers: Sequence[Sampler], numbers: Sequence[int], size: int) -> ScoreArray:
    """Gumbel noise (B, V) for these tokens."""
    noise = np.empty((len(samplers), size))
    for sampler, number, row in zip(samplers, numbers, noise, strict=True):
        sampler.fill_uniform(number, row)
    return -np.log(np.maximum(-np.log1p(-noise), _TINY))


def _add_noise(
    samplers: Sequence[Sampler],
    scores: ScoreArray,
    temperatures: float | ScoreArray,
    noise: ScoreArray,
) -> ScoreArray:
    """Scores (B, V), changed in place, as each row's sampler has them."""
    scores -= scores.max(axis=1, keepdims=True)
    scores /= temperatures
    for row, sampler in zip(scores, samplers, strict=True):
        if sampler.filters:
            sampler.keep_likeliest(row)
    scores += noise
    return scores


def likelihood(logits: FloatArray, token: int, alternatives: int) -> Likelihood:
    """The log-probability of the chosen token, and the likeliest tokens."""
    scores = log_softmax(logits)
    top = np.argsort(-scores, kind="stable")[:alternatives]
    return Likelihood(
        chosen=float(scores[token]),
        top=tuple((int(index), float(scores[index])) for index in top),
    )


def log_softmax(logits: FloatArray | ScoreArray) -> ScoreArray:
    """Log-probabilities (..., V) of logits (..., V), in float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return scores


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A translation so far; its tokens are without bos, and with eos."""

    tokens: tuple[int, ...]
    total: float  # sum of log-probabilities

    @property
    def score(self) -> float:
        return self.total / len(self.tokens)


class Beams:
    """One beam search: its live hypotheses, all of one length, and the finished ones.

    Each round ranks all continuations by the sum of log-probabilities over allowed tokens; equal
    ones by the rank of what they continue, then by the lower token. Of the first W, those that end
    are finished, up to W of them; the first W that do not end stay live. The answer is the finished
    hypothesis with the greatest mean log-probability a token, eos included, or the first live one.
    """

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
        """The prefixes to run next (B, N), with bos."""
        return np.array([(self._bos_id, *one.tokens) for one in self._live], dtype=np.int64)

    @property
    def over(self) -> bool:
        """Whether the search is over."""
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
        # Each live hypothesis ends in one way only, so twice the width leaves enough live ones.
        ranked = self._ranked(log_softmax(allowed), 2 * self._width)
        for one in ranked[: self._width]:
            if one.tokens[-1] == self._eos_id and len(self._finished) < self._width:
                self._finished.append(one)
        self._live = [one for one in ranked if one.tokens[-1] != self._eos_id][: self._width]

    def _ranked(self, scores: npt.NDArray[np.float64], count: int) -> list[Hypothesis]:
        """The best `count` continuations, from log-probabilities (B, V) of the next token."""
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
