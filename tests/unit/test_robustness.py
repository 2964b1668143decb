"""Robustness: noise of the right size, the same for all models, kept in the house form."""

from pathlib import Path

import pytest
import torch

from benchmarks import robustness
from benchmarks.lab import Result
from benchmarks.robustness import disturbances, disturbed, leave_out
from tests.fixtures.tiny_runs import tiny_text_recipe
from train.data import open_dataset
from train.data.batch import Batch
from train.loop import train


def test_characters_are_replaced_in_the_text_itself_and_it_is_kept(tmp_path: Path) -> None:
    recipe = tiny_text_recipe(tmp_path, "optim.iterations=2")
    train(recipe, tmp_path / "run", quiet=True)
    dataset = open_dataset(recipe)
    text, inputs_only = disturbances(dataset)
    clean = next(dataset.held_out(8))
    once, again = (next(disturbed(dataset, text, 0.1, 0, seed=1, size=8)) for _ in range(2))
    assert torch.equal(once.inputs[0], again.inputs[0])
    assert torch.equal(once.inputs[0][:, 1:], once.targets[:, :-1])
    share = float((once.inputs[0] != clean.inputs[0]).float().mean())
    assert 0.03 < share < 0.2
    read = next(disturbed(dataset, inputs_only, 0.1, 0, seed=1, size=8))
    assert torch.equal(read.targets, clean.targets)
    assert not torch.equal(read.inputs[0], clean.inputs[0])
    arguments = ["--quick", "--results", str(tmp_path), "--runs", str(tmp_path / "run")]
    assert robustness.main([*arguments, "--steps", "1,2", "--name", "robustness-tiny"]) == 0
    result = Result.read(tmp_path / "robustness-tiny.json")
    rows = result.tables[0].rows
    assert len(rows) == 2 * 2 * 5
    assert result.command.startswith("python -m benchmarks.robustness ")
    assert [row[10] for row in rows[:5]] == [1.44, 1.49, 1.55, 1.95, 2.42]
    assert rows[0][8] == "0.0000" and float(str(rows[4][8])) > 0


def test_clouds_lose_a_share_of_their_points() -> None:
    points = torch.arange(60.0).view(2, 10, 3)
    draw = torch.Generator().manual_seed(0)
    left = leave_out(Batch((points,), torch.zeros(2)), 0.2, draw).inputs[0]
    assert left.shape == (2, 8, 3)
    known = {tuple(point) for point in points.flatten(0, 1).tolist()}
    assert all(tuple(point) in known for point in left.flatten(0, 1).tolist())
    assert not torch.equal(left[0], left[1] - 30)  # each cloud loses others


def test_noise_has_the_size_that_it_says() -> None:
    draw = torch.Generator().manual_seed(0)
    shape = torch.Size((100, 100))
    assert float(robustness._gaussian(shape, draw).std()) == pytest.approx(1, abs=0.02)
    uniform = robustness._uniform(shape, draw)
    assert float(uniform.abs().max()) == pytest.approx(1, abs=0.01)
    assert float(uniform.mean()) == pytest.approx(0, abs=0.02)
