"""Robustness: noise of the right size, the same for all models, kept in the house form."""

from pathlib import Path

import pytest
import torch

from benchmarks import robustness
from benchmarks.lab import Result
from benchmarks.robustness import disturbances, disturbed, leave_out
from tests.fixtures.tiny_runs import tiny_image_recipe, tiny_label_recipe, tiny_text_recipe
from train.data import open_dataset
from train.data.arrays import ImageDataset
from train.data.batch import Batch
from train.loop import train


def test_characters_are_replaced_in_the_text_itself_and_it_is_kept(tmp_path: Path) -> None:
    recipe = tiny_text_recipe(tmp_path, "optim.iterations=2")
    train(recipe, tmp_path / "run", quiet=True)
    dataset = open_dataset(recipe)
    text, inputs_only = disturbances(dataset)
    clean = next(dataset.held_out(8))
    once, again = (next(disturbed(dataset, text, 0.1, 0, size=8)) for _ in range(2))
    assert torch.equal(once.inputs[0], again.inputs[0])
    assert torch.equal(once.inputs[0][:, 1:], once.targets[:, :-1])
    share = float((once.inputs[0] != clean.inputs[0]).float().mean())
    assert 0.03 < share < 0.2
    read = next(disturbed(dataset, inputs_only, 0.1, 0, size=8))
    assert torch.equal(read.targets, clean.targets)
    assert not torch.equal(read.inputs[0], clean.inputs[0])
    arguments = ["--quick", "--results", str(tmp_path), "--runs", str(tmp_path / "run")]
    assert robustness.main([*arguments, "--steps", "1,2", "--name", "robustness-tiny"]) == 0
    result = Result.read(tmp_path / "robustness-tiny.json")
    assert [table.caption for table in result.tables[:2]] == [
        f"{name}, by its level; not among the runs: discrete, lambda 0"
        for name in ("characters", "characters, inputs only")
    ]
    rows = result.tables[-1].rows
    assert len(rows) == 2 * 2 * 5
    assert result.command.startswith("python -m benchmarks.robustness ")
    paper = result.tables[0].rows[-1]
    assert [*paper] == ["paper, OT", None, None, None, "1.44", "1.49", "1.55", "1.95", "2.42"]
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


@pytest.mark.parametrize("level", [0.1, 0.5])
def test_pixels_get_the_noise_that_the_table_names(level: float, tmp_path: Path) -> None:
    recipe = tiny_image_recipe(tmp_path)
    dataset = open_dataset(recipe)
    assert isinstance(dataset, ImageDataset)
    clean = next(dataset.held_out(64))
    sizes = {}
    for one in disturbances(dataset):
        draw = torch.Generator().manual_seed(0)
        added = one.apply(clean, level, draw).inputs[0] - clean.inputs[0]
        sizes[one.name] = float(added.std()), float(added.abs().max())
    (std,) = dataset.std
    for unit, scale in (("", 1.0), (", of pixels", 1 / std)):
        gaussian, highest = sizes[f"gaussian{unit}"]
        assert gaussian == pytest.approx(level * scale, rel=0.05) and highest > 2 * gaussian
        uniform, highest = sizes[f"uniform{unit}"]
        assert uniform == pytest.approx(level * scale / 3**0.5, rel=0.05)
        assert highest == pytest.approx(level * scale, rel=0.02)


def test_models_stand_beside_each_other_with_their_seeds() -> None:
    values = {"mnist-0": 0.9, "mnist-1": 0.8, "mnist-discrete-0": 0.7}
    rows = [
        [run, "gaussian", 4, f"{level:g}", "accuracy", f"{value - level:.4f}", *"010", None, None]
        for run, value in values.items()
        for level in robustness.NOISE
    ]
    kinds = {"mnist": "OT, lambda 0.01", "mnist-discrete": "discrete"}
    (table,) = robustness.compared(rows, kinds)
    assert table.caption == "gaussian, by its level; not among the runs: lambda 0"
    assert table.columns[:5] == ("model", "what", "steps", "seeds", "0")
    ours, baseline, paper_baseline, paper_ot = table.rows
    assert ours[:5] == ["mnist", "OT, lambda 0.01", 4, 2, "0.8500 ± 0.0707"]
    assert ours[-1] == "0.3500 ± 0.0707"
    assert baseline[:5] == ["mnist-discrete", "discrete", 4, 1, "0.7000"]
    assert (paper_baseline[-1], paper_ot[-1]) == ("0.8064", "0.901")


def test_runs_of_different_data_are_measured_together(tmp_path: Path) -> None:
    text, labels = tmp_path / "tiny-text-0", tmp_path / "tiny-labels-discrete-3"
    train(tiny_text_recipe(tmp_path, "optim.iterations=2", "optim.transport=0"), text, quiet=True)
    train(tiny_label_recipe("optim.iterations=2", "model.depth=discrete"), labels, quiet=True)
    arguments = ["--quick", "--results", str(tmp_path), "--runs", str(text), str(labels)]
    assert robustness.main([*arguments, "--steps", "1"]) == 0
    tables = Result.read(tmp_path / "robustness.json").tables
    kinds = {(table.caption.partition(",")[0], table.rows[0][1]) for table in tables[:-1]}
    assert kinds == {("characters", "lambda 0"), ("tokens", "discrete")}
