"""The experiment on the theorem of stable forward propagation measures what the theorem says."""

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.lab import Provenance, Result
from benchmarks.papers import theory
from benchmarks.papers.theory import (
    RADIUS,
    STEPS,
    TEST_ROWS,
    Found,
    L,
    Setting,
    T,
    Toy,
    bound_of,
    jacobians,
    kept_or_made,
    main,
    measured,
    objective,
    pairs,
    pulled,
    result,
    rows_of,
    shifted,
    train_and_measure,
)
from train.quality import output_weights


def test_the_read_out_keeps_its_norm_while_it_is_trained() -> None:
    torch.manual_seed(0)
    toy = Toy()
    rows, classes = rows_of(64, torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(toy.parameters(), 0.1)
    before = output_weights(toy.read).clone()
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(toy.logits(toy.end(toy.embed(rows))[0]), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = output_weights(toy.read)
    assert not torch.allclose(before, after, atol=0.01)
    assert torch.linalg.matrix_norm(L * after, 2).item() == pytest.approx(L, rel=1e-5)


def test_distances_of_states_are_those_of_the_rows() -> None:
    rows, _ = rows_of(8, torch.Generator().manual_seed(0))
    states = Toy().embed(rows)
    assert torch.allclose(torch.pdist(states.flatten(1)), torch.pdist(rows.flatten(1)), atol=1e-5)


def test_classes_are_the_sign_of_the_inner_product_but_for_a_tenth() -> None:
    rows, classes = rows_of(20_000, torch.Generator().manual_seed(0))
    right = torch.einsum("rp,rp->r", rows[:, 0], rows[:, 1]) > 0
    assert (classes != right.long()).float().mean().item() == pytest.approx(0.1, abs=0.01)


def test_the_loss_and_its_figures_are_those_of_the_setting() -> None:
    """Against sums over the five steps of a path, written out."""
    torch.manual_seed(0)
    toy, setting = Toy().requires_grad_(False), Setting(2, 0)
    draw = torch.Generator().manual_seed(0)
    rows, classes = rows_of(16, draw)
    x0 = x = toy.embed(rows)
    cost = torch.zeros(())
    for _ in range(STEPS):
        v = toy.velocity(x)
        cost = cost + T / STEPS * v.square().sum((1, 2)).mean()
        x = x + T / STEPS * v
    task = torch.nn.functional.cross_entropy(toy.logits(x), classes)
    found = objective(toy, x0, classes, setting)
    assert found.item() == pytest.approx((task + setting.transport / 2 * cost).item(), rel=1e-5)

    draw = torch.Generator().manual_seed(1)
    shown = measured(toy, setting, x0, classes, draw)
    again = torch.Generator().manual_seed(1)
    test, test_classes = rows_of(TEST_ROWS, again)
    end, cost = toy.end(toy.embed(test))
    straight = (end - toy.embed(test)).flatten(1).norm(dim=1).square().mean() / T
    assert shown.bent == pytest.approx(1 - (straight / cost).item(), abs=1e-5)
    moved = shown.pulled_bound - shown.test_loss
    assert moved == pytest.approx(RADIUS * math.sqrt(2) * bound_of(2), rel=1e-5)
    noisy = test + 0.5 * torch.randn(test.shape, generator=again)
    logits = toy.logits(toy.end(toy.embed(noisy))[0])
    lost = torch.nn.functional.cross_entropy(logits, test_classes)
    assert shown.noisy_loss == pytest.approx(lost.item(), rel=1e-5)
    right = (logits.argmax(-1) == test_classes).float().mean()
    assert shown.noisy_accuracy == pytest.approx(right.item())


def test_the_bound_is_the_theorems() -> None:
    assert bound_of(2) == pytest.approx(L / (1 - 1 / 2))
    assert bound_of(10) == pytest.approx(L / (1 - 0.1))
    assert bound_of(1) == bound_of(0.5) == bound_of(0) == math.inf
    assert Setting(2, 0).transport == 2 * T * L**2


class Known(Toy):
    """Answers that are known: the first coordinate of the first point, times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def answer(self, x0: Tensor) -> Tensor:
        first = (x0 @ self.embedding.T)[:, 0, 0] * self.factor
        return torch.stack([first, -first], 1)


def test_slope_and_shift_of_a_linear_answer_are_its_factor() -> None:
    known = Known(0.7)
    rows, _ = rows_of(32, torch.Generator().manual_seed(0))
    slopes = torch.linalg.matrix_norm(jacobians(known, rows), 2)
    assert torch.allclose(slopes, torch.full((32,), 0.7 * math.sqrt(2)), atol=1e-5)
    x0 = known.embed(rows)
    steepest = shifted(known, x0, known.answer(x0))
    assert 0.3 * math.sqrt(2) < steepest <= 0.7 * math.sqrt(2) + 1e-5


def test_a_pair_that_breaks_the_inequality_is_counted() -> None:
    x0 = torch.tensor([[[0.0]], [[1.0]], [[5.0]]])
    answers = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])
    classes = torch.tensor([0, 0, 1])
    # The first two are sqrt(2) apart where 1 / (1 - 1/10) is allowed; the others are far apart.
    steepest, broken = pairs(x0, answers, classes, Setting(10, 0))
    assert steepest == pytest.approx(math.sqrt(2)) and broken == pytest.approx(1 / 3)
    # Of two classes, sqrt(2) / 10 more is allowed before division.
    assert pairs(x0, answers, torch.tensor([0, 1, 1]), Setting(10, 0))[1] == pytest.approx(1 / 3)
    assert pairs(x0, answers, torch.tensor([0, 1, 1]), Setting(4, 0))[1] == 0
    assert pairs(x0, answers, classes, Setting(0.1, 0))[1] == 0


def test_rows_are_pulled_up_their_gradient_and_no_farther_than_allowed() -> None:
    torch.manual_seed(0)
    toy = Toy().requires_grad_(False)
    seen: list[Tensor] = []
    embed = toy.embed

    def watched(rows: Tensor) -> Tensor:
        seen.append(rows.detach())
        return embed(rows)

    rows, classes = rows_of(64, torch.Generator().manual_seed(0))
    clean = torch.nn.functional.cross_entropy(toy.logits(toy.end(toy.embed(rows))[0]), classes)
    toy.embed = watched  # type: ignore[method-assign]  # what it is asked is kept
    assert pulled(toy, rows, classes) > clean.item()
    moved = (seen[-1] - rows).flatten(1).norm(dim=1)
    assert 0.4 < moved.max().item() <= 0.5 + 1e-5


@pytest.mark.long
def test_a_larger_lambda_moves_states_less() -> None:
    far, near = (train_and_measure(Setting(ratio, 0, 60)) for ratio in (0.01, 3.0))
    assert near.cost < far.cost and near.bound == pytest.approx(1.5) and far.bound == math.inf
    assert far.gap == far.test_loss - far.training_loss


@pytest.mark.long
def test_what_breaks_the_bound_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--quick", "--seeds", "0", "--ratios", "0", "2", "--results", str(tmp_path)]
    command += ["--out", str(tmp_path / "runs" / "theory.jsonl")]
    assert main(command) == 0
    kept = Result.read(tmp_path / "theory.json")
    assert [row[0] for row in kept.tables[0].rows] == ["0", "2"]
    assert all(target.met for target in kept.targets)
    values = dict.fromkeys((field.name for field in fields(Found)), 0.0)
    steep = Found(**{**values, "slope": 2.5, "bound": 2.0, "broken": 0.25})
    shown = result({2.0: [steep]}, Provenance.now("papers.theory", []))
    assert [target.value for target in shown.targets] == [1, 0.25]
    assert not any(target.met for target in shown.targets)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "theory.jsonl"
    first = kept_or_made(Setting(2, 0, 3), file)
    trained: list[Setting] = []

    def watched(setting: Setting) -> Found:
        trained.append(setting)
        return first

    monkeypatch.setattr(theory, "train_and_measure", watched)
    assert kept_or_made(Setting(2, 0, 3), file) == first and not trained
    file.write_text(file.read_text() + '{"setting": {"ra')  # killed while it wrote the next
    for _ in range(2):
        kept_or_made(Setting(2, 1, 3), file)
    assert trained == [Setting(2, 1, 3)]
    monkeypatch.setattr(theory, "CONSTANTS", (1,))  # another experiment
    kept_or_made(Setting(2, 0, 3), file)
    assert trained[-1] == Setting(2, 0, 3)
