"""The server's beam search answers what the one that measures BLEU does."""

import numpy as np
import pytest
import torch
from torch import Tensor

from serve.engine.search import Beams
from train.search import Hypothesis, Target, beam

VOCABULARY, LONGEST = 12, 9
TARGET = Target(begin=1, end=2, longest=LONGEST)


class Table:
    """A translator of made-up logits, which depend on the last three tokens and on the source.

    They are rounded, so that equal scores are common.
    """

    def __init__(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        logits = np.round(chance.normal(0, 1.5, (7, VOCABULARY, VOCABULARY)), 1)
        logits[:, :, TARGET.end] -= 1.0
        self.logits = torch.tensor(logits, dtype=torch.float32)

    def encode(self, source: Tensor, steps: int, method: str) -> Tensor:
        return source[:, :1, None].float()

    def mask_of(self, source: Tensor) -> Tensor:
        return source != 0

    def decode(
        self,
        memory: Tensor,
        source_mask: Tensor,
        target: Tensor,
        steps: int,
        method: str,
        keep: Tensor | None,
    ) -> Tensor:
        place = (target[:, -3:].sum(1) + memory[:, 0, 0].long()) % 7
        return self.logits[place, target[:, -1]][:, None]  # (B, 1, V)


def served(model: Table, source: Tensor, width: int) -> Hypothesis:
    beams = Beams(width, LONGEST, TARGET.begin, TARGET.end, banned=(TARGET.pad, TARGET.begin))
    memory = model.encode(source, 1, "euler")
    while not beams.over:
        prefixes = torch.from_numpy(beams.prefixes)
        rows = memory.expand(len(prefixes), -1, -1)
        logits = model.decode(rows, model.mask_of(source), prefixes, 1, "euler", None)
        beams.grow(logits[:, 0].numpy())
    best = beams.best
    finished = best.tokens[-1] == TARGET.end
    return Hypothesis(best.tokens[:-1] if finished else best.tokens, best.score, finished)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_both_searches_give_the_same_answers(width: int) -> None:
    ended = 0
    for seed in range(30):
        model = Table(seed)
        source = torch.tensor([[3 + seed % 5, 4, 0]])
        (expected,) = beam(model, source, TARGET, width)
        found = served(model, source, width)
        assert (found.tokens, found.finished) == (expected.tokens, expected.finished)
        assert found.score == pytest.approx(expected.score, abs=1e-9)
        ended += found.finished
    assert ended > 0
