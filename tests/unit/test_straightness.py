"""What `evaluate` says beside quality, for every family; its table and its JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.__main__ import main as export
from tests.fixtures.tiny_runs import tiny_label_run, tiny_text_run
from train.__main__ import main
from train.checkpoint import load_run
from train.data import open_dataset
from train.data.batch import Sizes
from train.evaluate import LOGITS, POSITIONS, evaluate_run, rows_at_once
from train.model import Stepped, build_model
from train.objective import straightness_gap
from train.ode import integrate
from train.quality import StepRecorder, agreement, output_weights, stability
from train.recipe import ModelConfig, load_recipe

TINY = {"width": 16, "heads": 2, "hidden": 32, "window": 12}
TOKENS = torch.arange(1, 13).view(2, 6)


def made(sizes: Sizes, **changes: object) -> Stepped:
    torch.manual_seed(0)
    return build_model(ModelConfig(**{**TINY, **changes}), sizes).eval()  # type: ignore[arg-type]  # settings of several types


def families() -> dict[str, tuple[Stepped, tuple[torch.Tensor, ...], int]]:
    """A model of each kind, its inputs, and how many trajectories it follows."""
    words, classes = Sizes(vocabulary=20), Sizes(vocabulary=20, classes=3)
    padded = TOKENS.clone()
    padded[1, 4:] = 0
    image = Sizes(classes=3, channels=1, height=6, width=6)
    points = Sizes(classes=3, dimensions=3)
    chain = {"family": "encoder", "block": "timed", "depth": "chain"}
    return {
        "decoder": (made(words, family="decoder"), (TOKENS,), 1),
        "encoder": (made(classes, family="encoder"), (padded,), 1),
        "image": (made(image, family="image", patch=3), (torch.rand(2, 1, 6, 6),), 1),
        "set": (made(points, family="set"), (torch.rand(2, 5, 3),), 1),
        "translator": (made(words, family="translator"), (padded, TOKENS), 2),
        "chain": (made(classes, **chain), (padded,), 2),
        "discrete": (made(classes, family="encoder", depth="discrete"), (padded,), 1),
    }


@pytest.mark.parametrize("kind", families())
def test_every_family_is_measured(kind: str) -> None:
    model, inputs, trajectories = families()[kind]
    for steps, method in ((1, "euler"), (3, "euler"), (2, "rk4")):
        recorder = StepRecorder(model.T, (1, 2))
        with torch.no_grad():
            output = model(*inputs, steps=steps, method=method, observe=recorder)
        moved = recorder.displacements(output)
        gap, cost = float(straightness_gap(output)), float(output.cost)
        assert len(output.trajectories) == trajectories
        assert len(moved) == (1 if kind == "discrete" else trajectories * steps)
        assert min(moved) > 0 and cost > 0
        assert gap >= -1e-5 * cost  # no path is shorter than the straight one
        if method == "euler" and kind != "discrete":
            # Of Euler steps of size h the displacement is h v, and the cost is sum h mean(v^2).
            assert sum(moved) * steps / model.T == pytest.approx(cost, rel=1e-4)


def test_padding_changes_neither_gap_nor_displacement() -> None:
    model, _, _ = families()["encoder"]
    alone = TOKENS[:1, :4]
    padded = torch.cat([alone, torch.zeros(1, 2, dtype=torch.int64)], dim=1)
    found = []
    for tokens in (alone, padded):
        recorder = StepRecorder(model.T)
        with torch.no_grad():
            output = model(tokens, steps=3, observe=recorder)
        found.append([float(straightness_gap(output)), *recorder.displacements(output)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_stability_is_lambda_against_t_times_the_squared_norm_of_the_output_weights() -> None:
    model = made(Sizes(vocabulary=20), family="decoder", T=2.0)
    weights = torch.zeros(20, 16)
    weights[3, 4], weights[5, 6] = 3.0, -1.0  # singular values 3 and 1
    head = model.head.linear
    assert isinstance(head, nn.Linear) and output_weights(model.head) is head.weight
    head.weight.data.copy_(weights)
    found = stability(model, 0.9)
    assert found.squared_norm == pytest.approx(9)
    assert found.threshold == pytest.approx(18)
    assert found.ratio == pytest.approx(0.9 / 18)
    assert found.strict_ratio == pytest.approx(2 * 0.9 / 16 / 18)


@pytest.mark.parametrize("pool", ["mean", "max", "first"])
def test_a_head_that_reads_one_position_needs_lambda_times_the_positions(pool: str) -> None:
    """The mean of N positions moves by 1 / sqrt(N) of the whole state; one of them by all of it."""
    model = made(Sizes(vocabulary=20, classes=3), family="encoder", pool=pool)
    one, many = stability(model, 0.9), stability(model, 0.9, positions=7)
    assert many.ratio == one.ratio
    expected = one.strict_ratio if pool == "mean" else one.strict_ratio / 7
    assert many.strict_ratio == pytest.approx(expected)


@pytest.mark.parametrize("setting", [{"coda": 1}, {"inject": True}])
def test_a_head_behind_blocks_of_its_own_reads_as_many(setting: dict[str, Any]) -> None:
    model = made(Sizes(vocabulary=20, classes=3), family="encoder", pool="first", **setting)
    one, many = stability(model, 0.9), stability(model, 0.9, positions=7)
    assert many.strict_ratio == pytest.approx(one.strict_ratio / 7)


def test_the_positions_of_a_ratio_are_those_of_the_data(tmp_path: Path) -> None:
    small = ["optim.iterations=4", "run.evaluate_every=4"]
    run = tiny_label_run(tmp_path, *small, "model.pool=first")
    found = evaluate_run(run, [1])
    longest = max(
        batch.inputs[0].shape[1] for batch in open_dataset(load_run(run).recipe).held_out(64)
    )
    assert longest > 1
    weights = output_weights(load_run(run).model.head)
    transport = load_run(run).recipe.optim.transport
    expected = 2 * transport / (weights.shape[1] * longest) / found.stability.threshold
    assert found.stability.strict_ratio == pytest.approx(expected)


def test_agreement_counts_answers_that_count() -> None:
    one = torch.eye(3)[[0, 1, 2, 0]][None]  # answers 0 1 2 0
    other = torch.eye(3)[[0, 2, 2, 1]][None]
    assert agreement(one, other, torch.tensor([[5, 5, 5, -100]])) == (2, 3)


def test_one_euler_step_is_the_jump_of_any_grid(tmp_path: Path) -> None:
    """A velocity that sees no step size is first evaluated at x_0 on every grid alike."""
    run = tiny_text_run(tmp_path, "optim.iterations=10", "run.evaluate_every=10")
    report = evaluate_run(run, [1, 2, 4], ["euler", "heun"])
    assert [(row.method, row.steps, row.nfe) for row in report.rows] == [
        ("euler", 1, 1),
        ("euler", 2, 2),
        ("euler", 4, 4),
        ("heun", 1, 2),
        ("heun", 2, 4),
        ("heun", 4, 8),
    ]
    by_steps = {(row.method, row.steps): row for row in report.rows}
    assert by_steps["euler", 4].agreement == by_steps["heun", 4].agreement == 1
    assert report.jumps["euler"][1] == pytest.approx(by_steps["euler", 1].agreement)
    assert set(report.jumps["euler"]) == {1, 2, 4}
    assert [len(row.displacements) for row in report.rows] == [1, 2, 4] * 2
    losses = {steps: by_steps["euler", steps].quality.value for steps in (1, 2, 4)}
    found = report.ranges["euler"]
    assert (found.first, found.best) == (1, min(losses, key=losses.__getitem__))
    assert found.gain.better == pytest.approx(losses[1] - losses[found.best], abs=1e-6)
    assert len(set(losses.values())) == 3


def test_the_command_writes_a_narrow_table_and_everything_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["optim.iterations=4", "run.evaluate_every=4", "steps.solver=adaptive"]
    run = tiny_label_run(
        tmp_path, *small, "model.block=timed", "model.depth=chain", "steps.tolerance=1e-3"
    )
    figures = tmp_path / "figures.json"
    command = ["evaluate", str(run), "--steps", "1,4", "--method", "all", "--json", str(figures)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 110
    assert "adaptive" in printed and "evaluations of the adaptive solver" in printed
    assert printed.count("answers that are those of the adaptive solver") == 6
    written = json.loads(figures.read_text())
    assert [row["steps"] for row in written["rows"]] == [None, *[1, 4] * 5]
    assert written["rows"][0]["nfe"] >= 2 * 6
    lengths = {entry["length"]: entry["rows"] for entry in written["lengths"]}
    assert sum(lengths.values()) == 510 and len(lengths) > 1
    assert all(entry["nfe"] >= 2 * 6 for entry in written["lengths"])
    assert not any(written["jumps"].values())  # no line leads from one ODE to the end of another
    assert main(["evaluate", str(run), "--method", "leapfrog"]) == 2
    assert "choose one of euler" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sizes", "numbers"),
    [
        ("transevolve-imdb-chars", Sizes(vocabulary=200, classes=2), 4000),
        ("gpt2-openwebtext", Sizes(vocabulary=50257), 1024 * 50257),
        ("multi30k", Sizes(vocabulary=10000), 96 * 10000),
    ],
)
def test_batches_of_long_rows_and_large_vocabularies_are_small(
    name: str, sizes: Sizes, numbers: int
) -> None:
    recipe = load_recipe(name)
    rows = rows_at_once(recipe, sizes)
    assert 1 <= rows <= max(1, (POSITIONS if sizes.classes else LOGITS) // numbers)


def test_a_discrete_run_has_one_row_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_label_run(
        tmp_path, "model.depth=discrete", "optim.iterations=4", "run.evaluate_every=4"
    )
    (row,) = evaluate_run(run, [1, 2, 4], ["euler", "heun"]).rows
    assert (row.method, row.steps, row.nfe, row.agreement) == ("discrete", 1, 1, 1)
    assert row.gap == pytest.approx(0)
    only = "it has one answer, at 1 step"
    for asked, said in ((["--steps", "1,2"], True), (["--method", "all"], True), ([], False)):
        assert main(["evaluate", str(run), *asked]) == 0
        assert (only in capsys.readouterr().out) == said


def test_a_run_that_made_its_data_is_measured_on_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_label_run(tmp_path, "optim.iterations=2", "run.evaluate_every=2")
    assert main(["evaluate", str(run), "--data", "mine.csv"]) == 2
    assert main(["retrofit", str(run), "--data", "mine.csv"]) == 2
    assert export(["export", str(run), "--data", "mine.csv"]) == 2
    assert capsys.readouterr().err.count("would not read mine.csv: leave that out") == 3


def test_every_jump_of_a_straight_path_ends_where_the_path_does() -> None:
    x, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    recorder = StepRecorder(1.5, jumps=(1, 2, 4))
    end = integrate(lambda _: v, x, steps=4, T=1.5, observe=recorder).state
    assert set(recorder.jumps) == {1, 2, 4}
    for jumped in recorder.jumps.values():
        torch.testing.assert_close(jumped, end)
