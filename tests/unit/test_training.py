"""The loop: it learns, resumes exactly, refuses what would mislead, and stops on NaN."""

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.fixtures.tiny_runs import (
    tiny_image_recipe,
    tiny_label_recipe,
    tiny_label_run,
    tiny_point_recipe,
    tiny_text_recipe,
    tiny_text_run,
)
from train.__main__ import main
from train.blocks import Conditioned
from train.checkpoint import RunError, load_run, lock_run
from train.data.batch import Sizes
from train.devices import Devices
from train.interrupt import Diverged
from train.loop import Best, MetricsLog, TrainingLoop, learning_rate, train
from train.metrics import read_metrics
from train.model import OTTransformer, build_model
from train.recipe import ModelConfig, Recipe, RunConfig
from train.schedule import turn_for


def records(run: Path) -> list[dict[str, object]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_small_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    run = tiny_text_run(tmp_path, "optim.iterations=120", "optim.lr=0.01")
    kept = records(run)
    assert kept[-1]["iteration"] == 120
    first, last = kept[0]["loss"], kept[-1]["loss"]
    assert isinstance(first, float) and isinstance(last, float) and last < 0.8 * first
    validation = kept[-1]["validation"]
    assert isinstance(validation, dict) and set(validation) == {"loss@1", "loss@4"}
    assert {p.name for p in run.iterdir()} >= {
        "recipe.json",
        "tokenizer.json",
        "model.safetensors",
        "state.safetensors",
        "metrics.jsonl",
        "tensorboard",
    }
    assert list((run / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("recipe_of", "unit"),
    [
        (tiny_text_recipe, "tokens_per_s"),
        (tiny_image_recipe, "rows_per_s"),
        (tiny_point_recipe, "rows_per_s"),
    ],
)
def test_the_pace_is_in_tokens_or_in_rows(
    recipe_of: Callable[..., Recipe], unit: str, tmp_path: Path
) -> None:
    """Not in pixels, whose number says nothing."""
    recipe = recipe_of(tmp_path, "optim.iterations=1")
    train(recipe, tmp_path / "run", quiet=True)
    (record,) = records(tmp_path / "run")
    assert [key for key in record if key.endswith("_per_s")] == [unit]
    pace = record[unit]
    assert isinstance(pace, int) and pace > 0


def test_the_rate_warms_up_and_decays(tmp_path: Path) -> None:
    recipe = tiny_text_recipe(tmp_path, "optim.iterations=100", "optim.warmup=10")
    rates = [learning_rate(i, recipe) for i in range(100)]
    assert rates[0] < rates[5] < rates[9]
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] < 0.1 * max(rates)


def test_the_best_evaluation_has_the_most_accuracy_or_the_least_loss_and_is_the_first_of_equal(
    tmp_path: Path,
) -> None:
    model = build_model(DECODER, Sizes(vocabulary=20))
    for name, sign in (("accuracy", 1.0), ("loss", -1.0)):
        (tmp_path / name).mkdir()
        best = Best(tmp_path / name, RunConfig(keep="best", evaluate_every=5, patience=2))
        for iteration, values in ((5, (0.2, 0.6)), (10, (0.5, 0.5)), (15, (0.5, 0.5))):
            assert not best.is_over(iteration)
            shown = {
                f"{name}@{count}": sign * value for count, value in zip((1, 4), values, strict=True)
            }
            best.note(iteration, shown, model)
        assert best.value == pytest.approx(0.5) and best.iteration == 10
        assert not best.is_over(19) and best.is_over(20)


def test_a_run_that_stopped_early_has_nothing_left_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stopped behind its last checkpoint; the same command must not train that part again."""
    best = ["run.keep=best", "run.patience=1", "run.evaluate_every=2", "run.checkpoint_every=100"]
    recipe, run = tiny_label_recipe("optim.iterations=40", "optim.lr=1e-30", *best), tmp_path / "a"
    train(recipe, run, quiet=True)
    with safe_open(run / "state.safetensors", framework="pt") as file:
        assert file.metadata()["iteration"] == "4"
    before = {path.name: path.read_bytes() for path in run.glob("*.safetensors")}
    monkeypatch.delattr(TrainingLoop, "iterate")
    train(recipe, run, quiet=True)
    assert {path.name: path.read_bytes() for path in run.glob("*.safetensors")} == before
    assert load_run(run).facts["iteration"] == 2


def test_a_seed_decides_the_first_weights_and_every_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    seeded = Devices.seed

    def noting(devices: Devices, seed: int) -> None:
        drawn.append(seed)
        seeded(devices, seed)

    monkeypatch.setattr(Devices, "seed", noting)
    still = ["optim.iterations=2", "optim.lr=1e-30", "run.evaluate_every=2"]
    weights = []
    for seed in (0, 1):
        recipe = tiny_label_recipe(*still, f"run.seed={seed}")
        model = train(recipe, tmp_path / str(seed), quiet=True)
        weights.append(model.state_dict()["velocity.blocks.0.attention.qkv.weight"])
    assert not torch.allclose(*weights) and len(set(drawn)) == len(drawn) == 4


@pytest.mark.parametrize("kind", ["text", "label"])
@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, kind: str) -> None:
    """kill -9 in the middle, then the same command again: byte for byte the uninterrupted run."""
    overrides = ["optim.iterations=60", "model.dropout=0.1"]
    sandwich = ["steps.schedule=sandwich", "steps.distil=1", "steps.jump=0.3", "steps.grow=0.1"]
    recipe = (
        tiny_text_recipe(tmp_path, *overrides, *sandwich)
        if kind == "text"
        else tiny_label_recipe(*overrides, "optim.token_dropout=0.1")
    )
    train(recipe, tmp_path / "whole", quiet=True)
    script = tmp_path / "go.py"
    script.write_text(
        "import json, sys\nfrom pathlib import Path\nfrom train.recipe import recipe_from\n"
        "from train.loop import train\n"
        f"recipe = recipe_from(json.loads({json.dumps(recipe.to_json())!r}), 'test')\n"
        "train(recipe, Path(sys.argv[1]), quiet=True)\n"
    )
    killed = tmp_path / "killed"
    command = [sys.executable, str(script), str(killed)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 60
    while not _reached(killed, 10):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not _reached(killed, 60), "the run ended before it was killed; make it longer"
    train(recipe, killed, quiet=True)
    for name in ("model.safetensors", "state.safetensors"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _reached(run: Path, iteration: int) -> bool:
    try:
        with safe_open(run / "model.safetensors", framework="pt") as file:
            return int(file.metadata()["iteration"]) >= iteration
    except FileNotFoundError:
        return False


def test_another_recipe_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path)
    with pytest.raises(RunError, match=r"differs in optim\.lr"):
        train(tiny_label_recipe("optim.lr=0.5"), run, quiet=True)


def test_a_run_goes_on_watched_otherwise_but_not_with_another_seed(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path)
    train(tiny_label_recipe("run.evaluate_every=7", "run.checkpoint_every=7"), run, quiet=True)
    with pytest.raises(RunError, match=r"differs in run\.seed\)"):
        train(tiny_label_recipe("run.seed=9"), run, quiet=True)


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "run"):
        with pytest.raises(RunError, match="choose another --out"):
            train(tiny_label_recipe(), folder, quiet=True)


def test_other_data_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run = tiny_text_run(tmp_path)
    (tmp_path / "corpus.txt").write_text((tmp_path / "corpus.txt").read_text().replace("j", "é"))
    with pytest.raises(RunError, match="started on other data"):
        train(tiny_text_recipe(tmp_path), run, quiet=True)


def test_a_run_goes_on_where_its_data_has_moved(tmp_path: Path) -> None:
    run = tiny_text_run(tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "corpus.txt").rename(moved / "corpus.txt")
    before = (run / "model.safetensors").read_bytes()
    train(tiny_text_recipe(moved), run, quiet=True)
    assert (run / "model.safetensors").read_bytes() == before


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    with lock_run(tmp_path), pytest.raises(RunError, match="another training is at work"):
        train(tiny_label_recipe(), tmp_path, quiet=True)


@pytest.mark.parametrize("without", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_trained_on_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    without: int,
) -> None:
    def refuse(file: object, kind: int) -> None:
        raise OSError(without, os.strerror(without))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run(tmp_path / "run"):
        assert "has no locks" in caplog.text


@pytest.mark.parametrize("left", ["model.safetensors", "best.safetensors", "averaged"])
def test_nothing_begins_where_a_model_lies_that_cannot_be_gone_on_with(
    tmp_path: Path, left: str
) -> None:
    run = tiny_label_run(tmp_path)
    before = (run / "model.safetensors").read_bytes()
    (run / "state.safetensors").unlink()
    if left != "model.safetensors":
        (run / "model.safetensors").rename(run / left)
    with pytest.raises(RunError, match=rf"holds {left}, but not state.*choose another --out"):
        train(tiny_label_recipe(), run, quiet=True)
    assert (run / left).read_bytes() == before


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):  # a model of the Hub
        (tmp_path / name).write_text("mine")
    with pytest.raises(RunError, match=r"holds config\.json and is no run"):
        train(tiny_label_recipe(), tmp_path, quiet=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("config.json", "model.safetensors", "tokenizer.json"), "mine"
    )


def test_a_run_that_was_killed_before_it_had_a_recipe_begins_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".recipe.json.tmp").touch()
    (tmp_path / "tokenizer.json").write_text("{}")
    train(tiny_label_recipe(), tmp_path, quiet=True)
    assert load_run(tmp_path).model is not None


@pytest.mark.parametrize("where", ["iterate", "watch", "_save"])
def test_an_interrupt_anywhere_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C in the middle of whatever the loop does at that moment."""
    recipe = tiny_text_recipe(tmp_path, "model.dropout=0.1")
    train(recipe, tmp_path / "whole", quiet=True)
    original, calls = getattr(TrainingLoop, where), itertools.count()

    def interrupted(*arguments: object) -> object:
        if next(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, where, interrupted)
        if where == "watch":  # the second validation is the end: nothing is left to interrupt
            train(recipe, tmp_path / "broken", quiet=True)
        else:
            with pytest.raises(KeyboardInterrupt):
                train(recipe, tmp_path / "broken", quiet=True)
    train(recipe, tmp_path / "broken", quiet=True)
    whole, broken = (tmp_path / name / "state.safetensors" for name in ("whole", "broken"))
    assert whole.read_bytes() == broken.read_bytes()
    logs = [[r["iteration"] for r in records(tmp_path / name)] for name in ("whole", "broken")]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_terminal_leaves_a_checkpoint_and_under_nohup_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    recipe = tiny_label_recipe("optim.iterations=4")
    original = TrainingLoop.iterate

    def hung_up(loop: TrainingLoop, iteration: int) -> dict[str, Any]:
        if iteration == 1:
            signal.raise_signal(signal.SIGHUP)
        return original(loop, iteration)

    monkeypatch.setattr(TrainingLoop, "iterate", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
    try:
        with nullcontext() if ignored else pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path, quiet=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert load_run(tmp_path).facts["iteration"] == (4 if ignored else 2)


def test_a_teacher_without_its_weights_is_refused(tmp_path: Path) -> None:
    teacher = tiny_label_run(tmp_path, "optim.iterations=2")
    (teacher / "model.safetensors").unlink()
    recipe = tiny_label_recipe("optim.iterations=2", f"teacher.run={teacher}")
    with pytest.raises(RunError, match=r"model\.safetensors does not exist: the run has not"):
        train(recipe, tmp_path / "student", quiet=True)


def test_the_log_counts_cost_over_interruptions(tmp_path: Path) -> None:
    recipe = tiny_text_recipe(tmp_path, "optim.iterations=40", "run.evaluate_every=40")
    run = tmp_path / "run"
    train(recipe, run, quiet=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 999, "half a li')
    before = read_metrics(run / "metrics.jsonl")[-1]
    log = MetricsLog(run, 40)
    log.close()
    assert log.cpu_s == before["cpu_s"]
    logged = [
        (one["iteration"], "validation" in one, "cpu_s" in one)
        for one in read_metrics(run / "metrics.jsonl")
    ]
    assert logged == [(20, False, True), (40, True, True)]
    assert read_metrics(run / "metrics.jsonl")[-1] == before
    shown = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("loss")] == [20, 40]
    turns = [turn_for(i, 40, recipe.steps, recipe.run.seed) for i in range(40)]
    spent = sum(sum(turn.counts) for turn in turns)
    assert before["evaluations"] == spent


def test_a_diverging_run_names_its_last_checkpoint(tmp_path: Path) -> None:
    overrides = ["optim.lr=1e30", "optim.warmup=0", "run.checkpoint_every=1", "optim.clip=1e30"]
    with pytest.raises(Diverged, match=r"state\.safetensors, iteration \d+.*lower optim\.lr"):
        tiny_text_run(tmp_path, *overrides)
    model, _, _, facts = load_run(tmp_path / "run")
    assert facts["iteration"] >= 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_damaged_and_missing_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        load_run(tmp_path)
    run = tiny_label_run(tmp_path)
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        load_run(run)


def decoder_of(config: ModelConfig) -> OTTransformer:
    model = build_model(config, Sizes(vocabulary=20))
    assert isinstance(model, OTTransformer)
    return model.eval()


DECODER = ModelConfig("decoder", width=16, heads=2, hidden=32)


def test_a_discrete_model_ignores_steps() -> None:
    model = decoder_of(dataclasses.replace(DECODER, depth="discrete"))
    tokens = torch.randint(1, 20, (2, 9))
    x = model.embed(tokens).state
    assert torch.equal(model(tokens, steps=1).logits, model(tokens, steps=8).logits)
    assert torch.equal(model(tokens, steps=1).logits, model.head(model.velocity(x)))


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@pytest.mark.parametrize("final_norm", ["inside", "outside", "none"])
def test_one_step_is_x_plus_f_for_every_norm(norm: str, final_norm: str) -> None:
    changes: dict[str, Any] = {"norm": norm, "final_norm": final_norm}
    model = decoder_of(dataclasses.replace(DECODER, **changes))
    tokens = torch.randint(1, 20, (2, 9))
    x = model.embed(tokens).state
    assert torch.equal(model(tokens, steps=1).logits, model.head(x + model.velocity(x)))


@pytest.mark.parametrize("initial", ["gpt2", "torch"])
def test_conditioning_begins_as_nothing(initial: Any) -> None:
    made = decoder_of(dataclasses.replace(DECODER, initial=initial, conditioned=True))
    assert isinstance(made.velocity, Conditioned)
    x = torch.randn(2, 9, 16)
    for h in (1.0, 0.3):
        assert torch.equal(made.velocity(x, 0.0, h), made.velocity.velocity(x))
        made.velocity(x, 0.0, h).sum().backward()
    assert made.velocity.down.weight.grad is not None and made.velocity.down.weight.grad.any()


def test_conditioning_sees_the_binary_logarithm_of_a_step_or_of_one_more_than_the_time() -> None:
    for by_time, expected in ((False, -2.0), (True, 2.0)):
        made = Conditioned(torch.nn.Identity(), 4, by_time)
        seen: list[torch.Tensor] = []
        made.up.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        made(torch.zeros(1, 2, 4), 3.0, 0.25)
        assert float(seen[0]) == expected


def test_a_decoder_cannot_see_the_future_and_an_encoder_cannot_see_padding() -> None:
    decoder = decoder_of(DECODER)
    tokens = torch.randint(1, 20, (1, 9))
    changed = tokens.clone()
    changed[0, 6:] = 1
    before, after = decoder(tokens, steps=3).logits, decoder(changed, steps=3).logits
    assert torch.equal(before[:, :6], after[:, :6])
    for pool in ("mean", "max"):
        config = ModelConfig("encoder", width=16, heads=2, hidden=32, pool=pool)
        encoder = build_model(config, Sizes(vocabulary=20, classes=3)).eval()
        padded = torch.cat([tokens, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
        one, other = encoder(tokens, steps=3).logits, encoder(padded, steps=3).logits
        torch.testing.assert_close(one, other)


def test_the_commands_train_evaluate_and_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    small = ["optim.iterations=4", "data.rows=200", "run.evaluate_every=4", "optim.batch=8"]
    command = ["train", "parity", "--out", run]
    for setting in small:
        command += ["--set", setting]
    assert main(command) == 0
    assert "next: stepdial export" in capsys.readouterr().out
    assert main(["evaluate", run, "--steps", "1,2"]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert (tmp_path / "run" / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert main(["evaluate", run, "--steps", "zero"]) == 2
    assert "write counts like 1,2,4,8" in capsys.readouterr().err
    assert main(["train", "sentiment", "--out", str(tmp_path / "other")]) == 2
    assert "pass --data FOLDER" in capsys.readouterr().err
