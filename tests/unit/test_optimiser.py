"""What training does beside the model: rates, decay, smoothing, hidden tokens, averages."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.fixtures.tiny_runs import tiny_label_recipe, tiny_pair_recipe, tiny_text_recipe
from train.checkpoint import AVERAGED, MODEL, RunError, load_run, load_weights
from train.data import open_dataset
from train.data.batch import IGNORED, Sizes
from train.data.labelled import LabelledDataset
from train.devices import Devices
from train.families import InducedBlock
from train.loop import TrainingLoop, learning_rate, make_optimiser, train
from train.metrics import METRICS, read_metrics
from train.model import build_model
from train.objective import task_loss
from train.recipe import Recipe, load_recipe
from train.schedule import turn_for


def rates(*overrides: str) -> list[float]:
    recipe = load_recipe("parity", ["steps.schedule=fixed", "optim.iterations=100", *overrides])
    return [learning_rate(i, recipe) for i in range(100)]


def test_a_cosine_falls_to_its_last_rate_by_half_at_half() -> None:
    found = rates("optim.lr=0.5", "optim.warmup=10", "optim.final_lr=0.1")
    for i, rate in enumerate(found):
        warm = min(1.0, (i + 1) / 10)
        share = (1 + math.cos(math.pi * i / 100)) / 2
        assert rate == pytest.approx(warm * 0.5 * (0.1 + 0.9 * share))
    assert found[50] == pytest.approx(0.5 * 0.55)
    assert found[25] == pytest.approx(0.5 * (0.1 + 0.9 * (1 + 2**-0.5) / 2))


def test_drops_are_tenfold_each() -> None:
    found = rates(
        "optim.lr=0.5", "optim.warmup=0", "optim.schedule=drops", "optim.drops=[0.4, 0.9]"
    )
    expected = [0.5] * 40 + [0.05] * 50 + [0.005] * 10
    assert found == pytest.approx(expected)


def test_an_inverse_square_root_is_the_published_rate() -> None:
    """lr_max / sqrt(d) * min(step^-1/2, step * warmup^-3/2), counted from 1."""
    lr_max, d, warmup = 0.5, 256, 40
    peak = lr_max * d**-0.5 * warmup**-0.5
    found = rates(f"optim.lr={peak!r}", f"optim.warmup={warmup}", "optim.schedule=inverse-sqrt")
    steps = range(1, 101)
    assert found == pytest.approx(
        [lr_max * d**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in steps]
    )
    assert max(found) == pytest.approx(peak) and found.index(max(found)) == warmup - 1


def test_decay_is_of_matrices_but_not_of_embeddings_and_betas_are_those_asked_for() -> None:
    recipe = tiny_label_recipe("optim.weight_decay=0.3", "optim.beta2=0.97")
    model = build_model(recipe.model, open_dataset(recipe).sizes)
    optimiser = make_optimiser(model, recipe.optim)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = (
        {names[id(parameter)] for parameter in group["params"]} for group in optimiser.param_groups
    )
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.3, 0.0]
    assert [group["betas"] for group in optimiser.param_groups] == [(0.9, 0.97)] * 2
    assert "velocity.blocks.0.attention.qkv.weight" in decayed and "head.linear.weight" in decayed
    for name in ("embed.tokens.weight", "embed.positions.weight", "head.linear.bias"):
        assert name in plain
    assert "velocity.blocks.0.norm1.weight" in plain
    assert not decayed & plain and len(decayed | plain) == len(names)


def test_endings_learn_ten_times_as_fast_without_decay(tmp_path: Path) -> None:
    model: Any = build_model(tiny_label_recipe().model, Sizes(vocabulary=9, classes=2))
    model.velocity.endings = nn.Linear(3, 2, bias=False)
    optimiser = make_optimiser(model, tiny_label_recipe("optim.weight_decay=0.3").optim)
    *_, endings = optimiser.param_groups
    assert endings["params"] == [model.velocity.endings.weight]
    assert endings["weight_decay"] == 0
    loop = loop_of(tmp_path)
    loop.optimiser.param_groups[1] |= {"pace": endings["pace"]}
    rate = loop.iterate(3)["lr"]
    assert [group["lr"] for group in loop.optimiser.param_groups] == [rate, 10 * rate]


def test_endings_begin_a_training_of_their_own() -> None:
    def rate(iterations: int, *overrides: str) -> list[float]:
        recipe = load_recipe("parity", ["steps.schedule=fixed", *overrides])
        optim = dataclasses.replace(recipe.optim, iterations=iterations, warmup=5)
        made = dataclasses.replace(recipe, optim=optim)
        return [learning_rate(i, made) for i in range(iterations)]

    assert rate(100, "optim.endings=20") == rate(80) + rate(20)


def test_the_first_block_of_a_discrete_set_transformer_decays_as_the_others_do() -> None:
    recipe = load_recipe("modelnet-discrete", ["model.width=8", "model.heads=2"])
    model = build_model(recipe.model, Sizes(classes=3, dimensions=3))
    decayed = {id(one) for one in make_optimiser(model, recipe.optim).param_groups[0]["params"]}
    blocks = [one for one in model.modules() if isinstance(one, InducedBlock)]
    assert len(blocks) == recipe.model.layers
    for block in blocks:
        assert all(id(one) in decayed for one in block.parameters() if one.dim() > 1)


def test_smoothing_spreads_its_share_over_all_classes() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 5), torch.tensor([0, 4, 2, -100])
    shares = logits.log_softmax(-1)
    for smoothing in (0.0, 0.2):
        rows = [
            -(1 - smoothing) * shares[i, targets[i]] - smoothing * shares[i].mean()
            for i in range(3)
        ]
        found = task_loss(logits, targets, smoothing)
        torch.testing.assert_close(found, torch.stack(rows).mean())


def test_balanced_classes_weigh_alike_and_a_row_weighs_one_in_the_mean(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [f"text {i} of some words,{'rare' if i % 4 == 0 else 'common'}" for i in range(80)]
    table.write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    small = ["model.width=8", "model.heads=2", "model.hidden=8", "optim.transport=0"]
    settings = [*small, "optim.class_weights=balanced", "run.threads=1"]
    recipe = load_recipe("classifier", settings, str(table))
    dataset = open_dataset(recipe)
    assert isinstance(dataset, LabelledDataset)
    counts = torch.tensor(dataset.class_counts, dtype=torch.float32)  # common, rare
    model = build_model(recipe.model, dataset.sizes)
    optimiser = make_optimiser(model, recipe.optim)
    devices = Devices("cpu", "fp32")
    loop = TrainingLoop(recipe, tmp_path, dataset, model, optimiser, True, devices)
    weights = loop.objective.class_weights
    assert weights is not None and counts[0] > 2 * counts[1] > 0
    torch.testing.assert_close(weights * counts, (counts.sum() / 2).expand(2))


def test_the_smoothing_of_a_recipe_reaches_its_loss(tmp_path: Path) -> None:
    losses = [
        loop_of(tmp_path, "optim.transport=0", f"optim.smoothing={share}").iterate(0)["loss"]
        for share in (0.0, 0.5)
    ]
    assert losses[0] != losses[1]


def loop_of(folder: Path, *overrides: str) -> TrainingLoop:
    return loop_for(tiny_label_recipe("optim.precision=fp32", *overrides), folder)


def loop_for(recipe: Recipe, folder: Path) -> TrainingLoop:
    devices = Devices("cpu", recipe.optim.precision)
    dataset = open_dataset(recipe)
    torch.manual_seed(0)
    model = build_model(recipe.model, dataset.sizes)
    optimiser = make_optimiser(model, recipe.optim)
    return TrainingLoop(recipe, folder, dataset, model, optimiser, True, devices)


def test_hidden_tokens_are_padding_of_the_share_and_never_the_first(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, "optim.token_dropout=0.5")
    batch = loop.dataset.batch(0, 64, 0)
    tokens = batch.inputs[0]
    torch.manual_seed(0)
    seen = torch.stack([loop._hide(batch)[0] for _ in range(20)])  # (20, B, N)
    assert torch.equal(seen[:, :, 0], tokens[:, 0].expand(20, -1))
    there = tokens[:, 1:].ne(0).expand(20, -1, -1)
    hidden = seen[:, :, 1:].eq(0) & there
    assert float(hidden.sum() / there.sum()) == pytest.approx(0.5, abs=0.05)
    changed = seen.ne(tokens)
    assert not seen[changed].any()


def keep_gradients(loop: TrainingLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an iteration leave the gradients that it found."""
    monkeypatch.setattr(loop.optimiser, "step", lambda: None)
    monkeypatch.setattr(loop.optimiser, "zero_grad", lambda set_to_none=True: None)


def test_the_log_has_the_norm_of_the_gradient_before_it_is_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, other = loop_of(tmp_path, "optim.clip=0.001"), loop_of(tmp_path, "optim.clip=1e6")
    norms: list[float] = []
    for one in (loop, other):
        keep_gradients(one, monkeypatch)
        record = one.iterate(0)
        grads = [p.grad for p in one.model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()))
    assert norms[0] == pytest.approx(0.001, rel=1e-3)
    assert record["gradient_norm"] == pytest.approx(norms[1], abs=1e-4) and norms[1] > 0.001


def test_an_iteration_learns_from_the_mean_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next two batches, of which a run without accumulation sees one an iteration."""
    settings = ["optim.clip=1e6", "steps.schedule=fixed", "model.dropout=0"]
    loop = loop_of(tmp_path, "optim.accumulate=2", *settings)
    keep_gradients(loop, monkeypatch)
    record = loop.iterate(3)
    found = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
    loop.model.zero_grad()
    for place in (6, 7):
        batch = loop.dataset.batch(place, loop.recipe.optim.batch, loop.recipe.run.seed)
        turn = turn_for(3, loop.recipe.optim.iterations, loop.steps, loop.recipe.run.seed)
        (one,) = loop.objective.passes(batch.inputs, batch.targets, turn)
        (one.loss / 2).backward()
    expected = [p.grad for p in loop.model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, expected)
    norm = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt()
    assert record["gradient_norm"] == pytest.approx(float(norm), abs=1e-4)


def test_all_targets_of_an_iteration_count_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch they lie in: of translations some have more targets than others."""
    settings = ["optim.clip=1e6", "model.dropout=0", "optim.transport=0", "optim.accumulate=2"]
    loop = loop_for(tiny_pair_recipe(tmp_path, *settings), tmp_path)
    optim, seed = loop.recipe.optim, loop.recipe.run.seed
    turn = turn_for(0, optim.iterations, loop.steps, seed)
    batches = [loop.dataset.batch(place, optim.batch, seed) for place in (0, 1)]
    counts = [int((batch.targets != IGNORED).sum()) for batch in batches]
    assert counts[0] != counts[1]
    for batch, count in zip(batches, counts, strict=True):
        for one in loop.objective.passes(batch.inputs, batch.targets, turn):
            (one.loss * count / sum(counts)).backward()
    expected = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
    loop.model.zero_grad()
    keep_gradients(loop, monkeypatch)
    loop.iterate(0)
    found = [p.grad for p in loop.model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, expected)


AVERAGE = ["optim.iterations=9", "run.checkpoint_every=2", "optim.average=3"]


def averaged(folder: Path) -> dict[str, torch.Tensor]:
    """The mean, from three files, of what was kept."""
    kept = sorted((folder / AVERAGED).iterdir(), key=lambda path: int(path.stem))
    assert [path.stem for path in kept] == ["6", "8", "9"]
    files = [load_file(path) for path in kept]
    return {name: sum(one[name] for one in files) / 3 for name in files[0]}  # type: ignore[misc]  # tensors


def test_a_run_leaves_the_mean_of_its_last_checkpoints(tmp_path: Path) -> None:
    recipe = tiny_label_recipe(*AVERAGE)
    run = tmp_path / "run"
    model = train(recipe, run, quiet=True)
    expected = averaged(run)
    left = load_file(run / MODEL)
    given = model.state_dict()  # to whom trains in Python too
    assert all(torch.equal(given[name], left[name]) for name in left)
    for name, value in expected.items():
        torch.testing.assert_close(left[name], value)
    assert load_run(run).facts["iteration"] == 9
    assert read_metrics(run / METRICS)[-1]["iteration"] == 9  # the end is measured, 10 or not
    last = load_file(run / AVERAGED / "9.safetensors")
    assert any(not torch.equal(left[name], last[name]) for name in last)
    train(recipe, run, quiet=True)  # nothing to do, and the mean is not averaged again
    again = load_file(run / MODEL)
    assert all(torch.equal(again[name], left[name]) for name in left)


def test_a_run_of_fewer_checkpoints_leaves_the_mean_of_those(tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["optim.iterations=4", "run.checkpoint_every=2", "optim.average=3"]
    train(tiny_label_recipe(*short), run, quiet=True)
    two, four = (load_file(run / AVERAGED / f"{i}.safetensors") for i in (2, 4))
    for name, value in load_file(run / MODEL).items():
        torch.testing.assert_close(value, (two[name] + four[name]) / 2)


def test_an_interrupted_run_averages_the_same_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_label_recipe(*AVERAGE)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe, whole, quiet=True)
    iterate = TrainingLoop.iterate

    def stop(self: TrainingLoop, iteration: int) -> dict[str, Any]:
        if iteration == 6:  # after the checkpoint of 6, which is kept
            raise RuntimeError("killed")
        return iterate(self, iteration)

    monkeypatch.setattr(TrainingLoop, "iterate", stop)
    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, broken, quiet=True)
    monkeypatch.setattr(TrainingLoop, "iterate", iterate)
    (broken / AVERAGED / "6.safetensors").unlink()  # as if it had been killed before it was kept
    train(recipe, broken, quiet=True)
    for name, value in load_file(whole / MODEL).items():
        assert torch.equal(load_file(broken / MODEL)[name], value)


def test_weights_of_another_form_are_refused_by_name(tmp_path: Path) -> None:
    recipe: Recipe = tiny_text_recipe(tmp_path)
    model = build_model(recipe.model, open_dataset(recipe).sizes)
    weights = dict(model.state_dict())
    weights["old.name"] = torch.zeros(1)
    with pytest.raises(RunError, match=r"another form of the model .*old\.name"):
        load_weights(model, weights)


def test_what_a_log_keeps_is_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_label_recipe("optim.iterations=20"), run, quiet=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(record["gradient_norm"] > 0 for record in records)
