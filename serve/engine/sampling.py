"""Sampling: from the logits of one position to one token, and to what else was likely.

A token is the argmax of filtered log-probabilities plus Gumbel noise that depends on the seed and
the number of the token only, so a seed gives the same tokens whoever shares the batch. It
deliberately knows neither text nor models.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ScoreArray = npt.NDArray[np.float64]

MAX_SEED = 2**63 - 1
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: temperature first, then the k likeliest, then the likeliest p of the rest."""

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probabilities under the model itself: no temperature, no filter, no noise."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), likeliest first


class Sampler:
    """Chooses the tokens of one generation."""

    def __init__(self, sampling: Sampling, banned_tokens: tuple[int, ...] = ()) -> None:
        self._sampling = sampling
        self._banned = list(banned_tokens)
        # The counter is set for each token, so the state itself carries no history.
        self._bits = np.random.Philox(key=sampling.seed)
        self._state = self._bits.state
        self._uniform = np.random.Generator(self._bits)

    def choose(self, logits: FloatArray, number: int) -> int:
        """The token for logits (V,), as token `number` of the answer."""
        scores = logits.astype(np.float64)  # (V,)
        if self._banned:
            scores[self._banned] = -np.inf
        temperature = self._sampling.temperature
        if temperature == 0.0:
            return int(scores.argmax())
        scores -= scores.max()
        with np.errstate(over="ignore", divide="ignore"):
            scores /= temperature
        scores = self._filter(scores)
        return int((scores + self._noise(number, scores.size)).argmax())

    def _filter(self, scores: ScoreArray) -> ScoreArray:
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if top_k is not None and top_k < scores.size:
            # Stable, so that of equal scores the lower token stays, as the argmax would have it.
            order = np.argsort(-scores, kind="stable")
            scores[order[top_k:]] = -np.inf
        if top_p < 1.0:
            order = np.argsort(-scores, kind="stable")
            probabilities = np.exp(scores[order])
            probabilities /= probabilities.sum()
            # A token stays while those before it have not reached p: the likeliest always does.
            before = np.cumsum(probabilities) - probabilities
            scores[order[before >= top_p]] = -np.inf
        return scores

    def _noise(self, number: int, size: int) -> ScoreArray:
        """Gumbel noise (V,) for one token: a function of (seed, number)."""
        state = self._state
        state["state"]["counter"][:] = (0, number, 0, 0)
        state["buffer_pos"] = 4  # nothing left over from another token
        state["has_uint32"] = 0
        self._bits.state = state
        uniform = self._uniform.random(size)
        return -np.log(np.maximum(-np.log1p(-uniform), _TINY))


def likelihood(logits: FloatArray, token: int, alternatives: int) -> Likelihood:
    """The log-probability of the chosen token, and of the likeliest ones."""
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


def softmax(logits: FloatArray) -> ScoreArray:
    """Probabilities (..., C) of logits (..., C), in float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
