"""Greedy and beam search against exhaustive search, on models small enough for it."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from serve.engine.search import Beams
from tests.unit.test_translator import small
from train.search import Hypothesis, Target, beam, greedy

PAD, BEGIN, END, A, B, C = range(6)


class Toy:
    """Log-probabilities of the next token as a function of the tokens so far."""

    def __init__(self, following: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.following = following

    def encode(self, source: Tensor, steps: int, method: str) -> Tensor:
        return source[..., None].float()

    def mask_of(self, source: Tensor) -> Tensor:
        return source != PAD

    def decode(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int,
        method: str,
        keep: Tensor | None,
    ) -> Tensor:
        rows = [self.following(tuple(row)) for row in target.tolist()]
        return torch.stack(rows)[:, None]  # (R, 1, V)


def shares(**of: float) -> Tensor:
    logits = torch.full((6,), 1e-9)
    for name, share in of.items():
        logits[{"END": END, "A": A, "B": B, "C": C}[name]] = share
    return logits.log()


def trap(prefix: tuple[int, ...]) -> Tensor:
    """A looks best at first, but B goes on better."""
    return {
        (BEGIN,): shares(A=0.5, B=0.45, C=0.05),
        (BEGIN, A): shares(A=0.4, B=0.35, C=0.25),
        (BEGIN, B): shares(C=0.98, END=0.02),
    }.get(prefix, shares(END=0.9, C=0.1))


SOURCE = torch.tensor([[A, B]])


def test_beam_finds_what_greedy_misses() -> None:
    target = Target(BEGIN, END, longest=6)
    (near,) = greedy(Toy(trap), SOURCE, target)
    (far,) = beam(Toy(trap), SOURCE, target, width=2)
    assert near.tokens == (A, A)
    assert far.tokens == (B, C)
    assert far.score > near.score
    expected = torch.tensor([0.45, 0.98, 0.9]).log().sum() / 3  # the end is counted
    assert far.score == pytest.approx(float(expected), abs=1e-6)


def exhaustive(model: Toy, longest: int, alpha: float) -> Hypothesis:
    best = Hypothesis((), -torch.inf, True)
    for length in range(longest):
        for tokens in itertools.product((A, B, C), repeat=length):
            total = 0.0
            for i, token in enumerate((*tokens, END)):
                logits = model.following((BEGIN, *tokens[:i])).double()
                logits[[PAD, BEGIN]] = -torch.inf
                total += float(logits.log_softmax(-1)[token])
            score = total / (length + 1) ** alpha
            if score > best.score:
                best = Hypothesis(tokens, score, True)
    for tokens in itertools.product((A, B, C), repeat=longest):  # cut before their end
        total = 0.0
        for i, token in enumerate(tokens):
            logits = model.following((BEGIN, *tokens[:i])).double()
            logits[[PAD, BEGIN]] = -torch.inf
            total += float(logits.log_softmax(-1)[token])
        if total / longest**alpha > best.score:
            best = Hypothesis(tokens, total / longest**alpha, False)
    return best


def scattered(prefix: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(hash(prefix) % 2**31)
    return torch.randn(6, generator=draw) * 2


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_beam_wide_enough_is_exhaustive_search(alpha: float) -> None:
    model = Toy(scattered)
    (found,) = beam(model, SOURCE, Target(BEGIN, END, longest=4), width=200, alpha=alpha)
    expected = exhaustive(model, 4, alpha)
    assert found.tokens == expected.tokens
    assert found.score == pytest.approx(expected.score, abs=1e-9)


def test_ties_go_to_the_lower_token_and_the_better_ranked() -> None:
    even = Toy(lambda prefix: torch.zeros(6))
    target = Target(BEGIN, END, longest=3)
    assert greedy(even, SOURCE, target)[0].tokens == ()  # END is the lowest that may be written
    no_end = Toy(lambda prefix: torch.tensor([0.0, 0, -50 if len(prefix) < 3 else 0, 0, 0, 0]))
    for found in (greedy(no_end, SOURCE, target), beam(no_end, SOURCE, target, width=3)):
        assert found[0].tokens == (A, A)
        assert found[0].finished


def test_an_answer_that_does_not_end_is_cut_at_the_longest() -> None:
    endless = Toy(lambda prefix: torch.tensor([9.0, 9, -50, 1, 2, 3]))
    target = Target(BEGIN, END, longest=4)
    for found in (greedy(endless, SOURCE, target), beam(endless, SOURCE, target, width=3)):
        assert found[0].tokens == (C, C, C, C)
        assert not found[0].finished


def test_a_beam_of_one_is_greedy_and_batches_change_nothing() -> None:
    model = small(tied=False)
    target = Target(1, 2, longest=8)
    source = torch.randint(3, 12, (24, 6), generator=torch.Generator().manual_seed(3))
    source[::2, 4:] = 0
    likeliest = greedy(model, source, target, steps=2)
    assert len({len(one.tokens) for one in likeliest}) > 2  # some end, at several lengths
    for width, batch in ((1, likeliest), (3, beam(model, source, target, 3, steps=2))):
        for row, expected in zip(source, batch, strict=True):
            (found,) = beam(model, row[row != 0][None], target, width, steps=2)
            assert (found.tokens, found.finished) == (expected.tokens, expected.finished)
            assert found.score == pytest.approx(expected.score, abs=1e-4)


def test_a_beam_without_width_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        beam(Toy(trap), SOURCE, Target(BEGIN, END, longest=4), width=0)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_server_searches_alike(width: int) -> None:
    model, target = Toy(scattered), Target(BEGIN, END, longest=6)
    (found,) = beam(model, SOURCE, target, width)
    served = Beams(width, target.longest, BEGIN, END, banned=(PAD, BEGIN))
    while not served.over:
        logits = [model.following(tuple(row)) for row in served.prefixes.tolist()]
        served.grow(torch.stack(logits).numpy())
    ended = (END,) if found.finished else ()
    assert served.best.tokens == found.tokens + ended
    assert served.best.score == pytest.approx(found.score, abs=1e-9)
