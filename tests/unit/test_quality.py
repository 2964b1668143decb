"""Quality and its interval: over tokens that count, with rows as the independent units."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor

from export.quality import add_answers, measured_by
from train.data.batch import IGNORED, Batch, Sizes
from train.model import build_model
from train.quality import Tally, measure_model
from train.recipe import ModelConfig
from train.tally import Sums, wilson

SHARES = torch.tensor([0.5, 0.3, 0.2])
LONGEST = 8


def ragged(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits that never change, and rows of 1 to 8 targets; all of a short row are unlikely."""
    lengths = torch.randint(1, LONGEST + 1, (rows, 1), generator=draw)
    targets = torch.multinomial(SHARES, rows * LONGEST, True, generator=draw).view(rows, LONGEST)
    targets[(lengths < 4).expand(-1, LONGEST)] = 2
    targets[torch.arange(LONGEST) >= lengths] = IGNORED
    return SHARES.log().expand(rows, LONGEST, 3), targets


def tally_of(logits: Tensor, targets: Tensor) -> Tally:
    tally = Tally()
    for some in torch.arange(len(targets)).split(7):
        tally.add(Batch((targets[some],), targets[some]), logits[some], 0.0)
    return tally


def test_a_loss_is_that_of_all_tokens_together_however_rows_are_batched() -> None:
    logits, targets = ragged(20, torch.Generator().manual_seed(0))
    tally = tally_of(logits, targets)
    quality = tally.quality(False)
    expected = F.cross_entropy(logits.reshape(-1, 3), targets.flatten(), ignore_index=IGNORED)
    assert quality.value == quality.loss == pytest.approx(float(expected), rel=1e-6)
    assert quality.samples == int((targets != IGNORED).sum())
    assert float(tally.per_row(False).mean()) == pytest.approx(quality.value)


def test_of_rows_of_one_length_the_interval_is_that_of_their_means() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(20, LONGEST, 3, generator=draw)
    targets = torch.randint(0, 3, (20, LONGEST), generator=draw)
    quality = tally_of(logits, targets).quality(False)
    means = F.cross_entropy(logits.mT, targets, reduction="none").mean(1)
    half = 2.0930241 * float(means.std()) / math.sqrt(20)  # Student's quantile of 19
    assert quality.high - quality.value == pytest.approx(half, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_one_label_a_row_has_the_macro_f1_of_scikit_learn(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (30,), generator=draw)  # of the fourth class there is none
    logits = torch.randn(30, 4, generator=draw)
    if seed % 2:
        logits[:, 3] = -math.inf  # nor is it answered
    answers = logits.argmax(-1)
    tally, found = tally_of(logits, targets), Sums()
    expected = f1_score(targets, answers, average="macro", zero_division=0)
    assert tally.quality(True).macro_f1 == pytest.approx(expected)
    assert tally.quality(False).macro_f1 is None
    add_answers(found, Batch((targets,), targets), logits.numpy())  # as a bundle is measured
    assert measured_by(found, True).macro_f1 == pytest.approx(expected)


def test_labels_of_positions_are_a_share_of_them_and_rows_are_right_in_all_or_not() -> None:
    right = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, IGNORED], [0, 0, 0, 0]]
    targets = torch.tensor(right)
    logits = torch.tensor([0.0, 1.0]).expand(4, 4, 2)  # the answer is 1 everywhere
    found = tally_of(logits, targets).quality(True)
    assert (found.metric, found.samples, found.whole) == ("accuracy", 15, 0.5)
    assert found.macro_f1 is None
    assert found.value == pytest.approx(9 / 15)
    counts, hits = (torch.tensor(each).double() for each in ([4, 4, 3, 4], [4, 2, 3, 0]))
    assert (found.low, found.high) == (0, 1)  # of four rows
    many = tally_of(logits.repeat(10, 1, 1), targets.repeat(10, 1)).quality(True)
    apart = ((hits - 0.6 * counts) / counts.mean()).repeat(10)
    half = 2.0226909 * float(apart.std()) / math.sqrt(40)  # Student's quantile of 39
    assert (many.low, many.high) == pytest.approx((0.6 - half, 0.6 + half), rel=1e-5)


def test_an_interval_of_ragged_rows_holds_the_truth_as_often_as_it_says() -> None:
    entropy = float(-(SHARES * SHARES.log()).sum())
    unlikely = -math.log(0.2)
    truth = ((1 + 2 + 3) * unlikely + (4 + 5 + 6 + 7 + 8) * entropy) / 36
    draw = torch.Generator().manual_seed(2)
    found = [tally_of(*ragged(150, draw)).quality(False) for _ in range(200)]
    assert 0.9 < sum(q.low <= truth <= q.high for q in found) / 200 <= 0.99


@pytest.mark.parametrize("rows", [1, 8, 30, 97])
def test_the_interval_of_a_share_holds_it_even_where_all_are_right(rows: int) -> None:
    for hits in range(rows + 1):
        low, high = wilson(hits, rows)
        assert 0 <= low <= hits / rows <= high <= 1


def test_the_interval_of_a_share_is_wilsons() -> None:
    """Its ends are where the share is z deviations of the binomial away from what was seen."""
    for hits, rows in ((8, 10), (3, 97), (60, 80)):
        for end in wilson(hits, rows):
            away = (hits / rows - end) ** 2
            assert away == pytest.approx(1.959964**2 * end * (1 - end) / rows, rel=1e-6)
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)


def test_a_model_is_measured_without_dropout_and_trains_on_with_it() -> None:
    config = ModelConfig("encoder", width=8, heads=2, hidden=8, dropout=0.5, embed_dropout=0.5)
    model = build_model(config, Sizes(vocabulary=9, classes=3)).train()
    batch = Batch((torch.arange(1, 9).view(2, 4),), torch.tensor([0, 2]))
    found = [measure_model(model, [batch], True, 2, "euler").loss for _ in range(2)]
    assert model.training
    logits = model.eval()(*batch.inputs, steps=2).logits.detach()
    assert found == pytest.approx([float(F.cross_entropy(logits, batch.targets))] * 2, rel=1e-5)
    measure_model(model, [batch], True, 2, "euler")
    assert not model.training
