"""Greedy and beam search for the answer of a translator. No sampling.

A hypothesis is a row of tokens after the begin token. The next token is one of all tokens but the
padding and the begin; its log-probability is the log-softmax of the logits over those. The score of
a hypothesis is

    the sum of its log-probabilities / length ** alpha,    the end token counted in the length.

Beam search of width W keeps up to W live hypotheses of one length, beginning with the empty one.
Each round
  1. every live hypothesis is continued by every token; these candidates are ranked by their sums,
     the best first, equal ones by the rank of what they continue, then by the lower token id;
  2. those among the first W candidates that end with the end token are finished, in that order,
     until there are W of them;
  3. the first W candidates that do not end live on, in that order.
It stops once W hypotheses are finished, or when the live ones are as long as an answer may be. The
answer is the finished hypothesis of the best score, the first finished of equal ones. Of a search
that was cut with fewer than W finished, it is the live one of the best rank, unfinished, if that
has a better score. With W = 1 this is greedy search.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Translates(Protocol):
    """What a search needs of a model."""

    def encode(self, source: Tensor, steps: int, method: str) -> Tensor: ...

    def decode(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int,
        method: str,
        keep: Tensor | None,
    ) -> Tensor: ...

    def mask_of(self, source: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Target:
    """The marks of a target, and how long an answer may be, its end token counted."""

    begin: int
    end: int
    longest: int
    pad: int = 0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: tuple[int, ...]  # without begin and end
    score: float
    finished: bool  # it came to its end token


@dataclass(frozen=True, slots=True)
class _Live:
    tokens: tuple[int, ...]  # begin first
    total: float  # sum of log-probabilities


class Reading:
    """Sources that have been encoded once; gives log-probabilities of next tokens."""

    def __init__(
        self, model: Translates, source: Tensor, target: Target, steps: int, method: str
    ) -> None:
        self.model, self.target, self.steps, self.method = model, target, steps, method
        self.memory = model.encode(source, steps, method)  # (B, S, D)
        self.mask = model.mask_of(source)  # (B, S)

    def following(self, rows: Tensor, prefixes: Tensor) -> Tensor:
        """Log-probabilities (R, V) after prefixes (R, N), of the sources numbered `rows` (R,)."""
        last = torch.tensor([prefixes.shape[1] - 1], device=prefixes.device)
        memory, mask = self.memory[rows], self.mask[rows]
        logits = self.model.decode(memory, mask, prefixes, self.steps, self.method, last)[:, 0]
        logits = logits.double()
        logits[:, [self.target.pad, self.target.begin]] = -torch.inf
        return logits.log_softmax(-1)


@torch.no_grad()
def greedy(
    model: Translates,
    source: Tensor,
    target: Target,
    steps: int = 1,
    method: str = "euler",
    alpha: float = 1.0,
) -> list[Hypothesis]:
    """The likeliest next token each time, for sources (B, S), padded on the right."""
    reading = Reading(model, source, target, steps, method)
    B = len(source)
    prefixes = torch.full((B, 1), target.begin, device=source.device)
    totals = torch.zeros(B, dtype=torch.float64, device=source.device)
    open_ = torch.arange(B, device=source.device)  # sources whose answer has not ended
    found: dict[int, Hypothesis] = {}
    for length in range(1, target.longest + 1):
        scores = reading.following(open_, prefixes)  # (R, V)
        token = scores.argmax(-1)  # the first of equal ones
        totals = totals + scores.gather(1, token[:, None])[:, 0]
        prefixes = torch.cat([prefixes, token[:, None]], dim=1)
        ended = token == target.end
        for row in (ended | (length == target.longest)).nonzero().flatten().tolist():
            finished = bool(ended[row])
            tokens = prefixes[row, 1:-1] if finished else prefixes[row, 1:]
            score = float(totals[row]) / length**alpha
            found[int(open_[row])] = Hypothesis(tuple(tokens.tolist()), score, finished)
        open_, prefixes, totals = open_[~ended], prefixes[~ended], totals[~ended]
        if not len(open_):
            break
    return [found[i] for i in range(B)]


@torch.no_grad()
def beam(
    model: Translates,
    source: Tensor,
    target: Target,
    width: int,
    steps: int = 1,
    method: str = "euler",
    alpha: float = 1.0,
) -> list[Hypothesis]:
    """The best of `width` finished hypotheses, for sources (B, S), padded on the right."""
    if width < 1:
        raise ValueError(f"a beam must be at least 1 wide, not {width}")
    reading = Reading(model, source, target, steps, method)
    live = {i: [_Live((target.begin,), 0.0)] for i in range(len(source))}
    finished: dict[int, list[Hypothesis]] = {i: [] for i in live}
    for length in range(1, target.longest + 1):
        going = [i for i in live if live[i] and len(finished[i]) < width]
        if not going:
            break
        rows = torch.tensor([i for i in going for _ in live[i]], device=source.device)
        prefixes = torch.tensor(
            [one.tokens for i in going for one in live[i]], device=source.device
        )
        scores = reading.following(rows, prefixes)
        at = 0
        for i in going:
            ranked = _ranked(live[i], scores[at : at + len(live[i])], 2 * width)
            at += len(live[i])
            for one in ranked[:width]:
                if one.tokens[-1] == target.end and len(finished[i]) < width:
                    score = one.total / length**alpha
                    finished[i].append(Hypothesis(one.tokens[1:-1], score, True))
            live[i] = [one for one in ranked if one.tokens[-1] != target.end][:width]
    return [_best(finished[i], live[i], alpha, width) for i in range(len(source))]


def _ranked(live: list[_Live], scores: Tensor, count: int) -> list[_Live]:
    """The best `count` continuations of live hypotheses, given scores (L, V) of next tokens."""
    before = torch.tensor([one.total for one in live], dtype=scores.dtype, device=scores.device)
    totals = (before[:, None] + scores).flatten()  # (L * V,)
    least = totals.topk(min(count, len(totals))).values[-1]
    places = (totals >= least).nonzero().flatten()  # ascending: the order of equal ones
    order = totals[places].sort(descending=True, stable=True).indices[:count]
    vocabulary = scores.shape[1]
    return [
        _Live((*live[place // vocabulary].tokens, place % vocabulary), float(totals[place]))
        for place in places[order].tolist()
        if totals[place] > -torch.inf
    ]


def _best(finished: list[Hypothesis], live: list[_Live], alpha: float, width: int) -> Hypothesis:
    """Of a search that was cut, the best live one counts too."""
    found = [*finished]
    if live and len(finished) < width:
        tokens, total = live[0].tokens[1:], live[0].total
        found.append(Hypothesis(tokens, total / len(tokens) ** alpha, False))
    return max(found, key=lambda one: one.score)  # the first of equal ones
