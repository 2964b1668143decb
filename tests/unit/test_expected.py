"""Expected answers: the model's own, whichever way and whenever they were worked out."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from export.draft import UNMEASURED
from export.verify import FLOOR, SLACK, Answers, Expected, FirstKept, VerificationError, _Check
from serve.bundle import Quality, Rung
from train.data.batch import Sizes
from train.model import OTTransformer, build_model
from train.recipe import ModelConfig

LADDER = (1, 2, 3)


@pytest.fixture(scope="module")
def model() -> OTTransformer:
    torch.manual_seed(0)
    config = ModelConfig("decoder", layers=1, heads=2, width=16, hidden=32, window=8)
    built = build_model(config, Sizes(vocabulary=11)).eval()
    assert isinstance(built, OTTransformer)
    return built


def samples() -> Sequence[tuple[Tensor, ...]]:
    return [(torch.arange(rows * 5).view(rows, 5) % 11,) for rows in (1, 2)]


@pytest.mark.parametrize("method", ["euler", "ab2", "rk4"])
def test_answers_are_the_models_own_and_the_same_ahead(model: OTTransformer, method: str) -> None:
    later, ahead = (Answers(model, samples(), method) for _ in range(2))
    with ahead.ahead(LADDER):
        pass  # whatever was begun by then is there
    for steps in LADDER:
        for one, other, (tokens,) in zip(later.at(steps), ahead.at(steps), samples(), strict=True):
            np.testing.assert_array_equal(one.logits, other.logits)
            assert one.float32_error == other.float32_error > 0
            with torch.no_grad():
                single = model(tokens, steps=steps, method=method).logits
            error = np.abs(single.double().numpy() - one.logits).max()
            assert one.float32_error == error < 1e-4


def test_what_fails_ahead_is_told(model: OTTransformer) -> None:
    answers = Answers(model, [(torch.full((1, 5), 99),)], "euler")  # no such token
    with pytest.raises(IndexError), answers.ahead(LADDER):
        pass


def test_the_first_evaluation_is_shared_by_rungs_and_only_that_one() -> None:
    seen = []

    class Velocity(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            seen.append(x)
            return -x * mask

    kept, x, mask = FirstKept(Velocity()), torch.ones(2, 3), torch.ones(2, 1)
    assert torch.equal(kept(x, mask), kept(x.clone(), mask)) and len(seen) == 1
    assert torch.equal(kept(x, mask * 2), -2 * x) and len(seen) == 2
    assert torch.equal(kept(x[:1], mask[:1]), -x[:1]) and len(seen) == 3
    assert torch.equal(kept(x / 2, mask), -x / 2) and len(seen) == 4


@pytest.mark.parametrize("spoilt", [0, 1, 2])
@pytest.mark.parametrize("number", [np.nan, np.inf, 1.1])
def test_one_wrong_answer_among_right_ones_is_told(spoilt: int, number: float) -> None:
    check = new_check()
    for index in range(3):
        right = np.ones((1, 4))
        check.begin(Expected((torch.zeros(1, 1),), right, 1e-7))
        check.compare(np.where(index == spoilt, number, right).astype(np.float32), "a batch")
    with pytest.raises(VerificationError, match="is off by"):
        check.verdict()


def test_a_model_that_overflows_in_float32_is_told() -> None:
    check = new_check()
    check.begin(Expected((torch.zeros(1, 1),), np.ones((1, 4)), np.inf))
    check.compare(np.full((1, 4), np.inf, np.float32), "a batch")
    with pytest.raises(VerificationError, match="is off by inf in a batch"):
        check.verdict()


def new_check() -> _Check:
    quality = Quality("accuracy", 0.0, 0.0, 0.0, 1)
    return _Check(Rung(1, "euler", 1, None, "steps-1.onnx", quality, UNMEASURED), SLACK, FLOOR)
