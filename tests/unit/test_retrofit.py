"""Retrofitting: what the new recipe is, who teaches, what is refused, and that it resumes."""

import errno
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.fixtures.tiny_runs import TINY, tiny_label_run
from train.__main__ import main
from train.checkpoint import RunError, load_run
from train.loop import TrainingLoop
from train.recipe import RecipeError, load_recipe
from train.retrofit import retrofit, retrofit_recipe

FIXED = ["steps.schedule=fixed", "optim.lr=0.003", "optim.iterations=20", "run.evaluate_every=20"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_label_run(tmp_path_factory.mktemp("original"), *FIXED)


def recipe_json(*overrides: str) -> dict[str, object]:
    return load_recipe("parity", [*TINY, *overrides]).to_json()


def test_the_recipe_is_the_original_made_short_and_any_step() -> None:
    dropping = ["optim.schedule=drops", "optim.drops=[0.8]"]
    kept = recipe_json(*FIXED, *dropping)
    made = retrofit_recipe(kept, "run", 0.2, ["run.checkpoint_every=7"])
    assert made.name == "parity-any"
    assert (made.steps.schedule, made.steps.full, made.steps.short) == ("sandwich", 4, (1, 2))
    assert (made.steps.grow, made.steps.distil, made.steps.jump) == (0.0, 1.0, 0.3)
    assert made.optim.iterations == 4 and made.optim.lr == load_recipe("parity").optim.lr
    assert (made.optim.schedule, made.optim.drops) == ("cosine", ())
    assert made.run.checkpoint_every == 7
    assert retrofit_recipe(kept, "run", 0.2, [], trained=10).optim.iterations == 2
    late = recipe_json(*FIXED, "steps.distil_from=0.5", "optim.warmup=9", "optim.iterations=400")
    late["name"] = "x" * 64
    made = retrofit_recipe(late, "run", 0.1, [])
    assert (made.steps.distil_from, made.optim.warmup, len(made.name)) == (0.0, 4, 64)
    unnamed = recipe_json(*FIXED, "steps.full=20", "steps.short=[]")
    assert retrofit_recipe(unnamed, "run", 0.2, []).steps.short == (1, 2, 4)
    chain = recipe_json(*FIXED, "model.block=timed", "model.depth=chain")
    assert retrofit_recipe(chain, "run", 0.2, []).steps.jump == 0  # a jump needs one trajectory
    cut = recipe_json(*FIXED, "steps.jump=0", "steps.backprop=2")
    assert retrofit_recipe(cut, "run", 0.2, []).steps.jump == 0  # and gradients through all of it


def test_with_the_dial_of_time_one_pass_is_read_at_every_count() -> None:
    timed = ["steps.dial=time", "model.T=4.0", "steps.jump=0"]
    for kept, asked in (
        (recipe_json(*FIXED, *timed, "steps.exits=[2]", "steps.exit_weights=[1, 2]"), []),
        (
            recipe_json(
                "steps.schedule=any", "steps.grow=0", *timed, "steps.stages=[0.2, 0.2, 0.6]"
            ),
            [],
        ),
        (recipe_json(*FIXED, "steps.jump=0.2"), ["steps.dial=time"]),  # an older run, read as time
    ):
        steps = retrofit_recipe(kept, "run", 0.2, asked).steps
        assert (steps.dial, steps.schedule, steps.exits) == ("time", "fixed", (1, 2))
        assert (steps.jump, steps.distil, steps.stages, steps.exit_weights) == (0, 1, (), ())
    translator = load_recipe("multi30k", ["steps.dial=time", "steps.jump=0", "model.T=8.0"])
    steps = retrofit_recipe(translator.to_json(), "run", 0.2, []).steps
    assert (steps.dial, steps.schedule, steps.exits) == ("time", "sandwich", ())


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.depth=discrete"], "its weights differ by depth"),
        (["steps.full=1", "steps.short=[]"], "trained at one step"),
        (
            ["model.block=timed", "model.depth=chain", "steps.solver=adaptive"],
            "its solver chose the steps itself",
        ),
    ],
)
def test_runs_of_one_depth_are_refused_with_the_reason(overrides: list[str], reason: str) -> None:
    kept = recipe_json("steps.schedule=fixed", *overrides)
    with pytest.raises(RunError, match=reason):
        retrofit_recipe(kept, "run", 0.2, [])


def test_endings_have_learnt_already() -> None:
    kept = recipe_json(*FIXED)
    kept["optim"]["endings"] = 5  # type: ignore[index]  # as only a conversion has it
    with pytest.raises(RunError, match="have endings of their own"):
        retrofit_recipe(kept, "run", 0.2, [])


def test_what_would_not_be_a_retrofit_is_refused(run: Path, tmp_path: Path) -> None:
    kept = recipe_json(*FIXED)
    with pytest.raises(RunError, match="a retrofit keeps the model"):
        retrofit_recipe(kept, "run", 0.2, ["model.layers=3"])
    with pytest.raises(RunError, match="give a share"):
        retrofit_recipe(kept, "run", 20, [])
    with pytest.raises(RecipeError, match="unknown key"):
        retrofit_recipe(kept, "run", 0.2, ["optim.speed=3"])
    with pytest.raises(RunError, match="choose another --out"):
        retrofit(run, run)
    with pytest.raises(RunError, match="started on other data"):
        retrofit(run, tmp_path / "other", overrides=["data.rows=300"])


def test_it_starts_from_the_run_keeps_its_teacher_and_resumes_exactly(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["optim.lr=0.01", "run.checkpoint_every=4"]
    run = shutil.copytree(run, tmp_path / "run")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    retrofit(run, whole, 0.5, overrides)
    original, calls = TrainingLoop.iterate, itertools.count()

    def interrupted(loop: TrainingLoop, iteration: int) -> dict[str, object]:
        if next(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return original(loop, iteration)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TrainingLoop, "iterate", interrupted)
        retrofit(run, broken, 0.5, overrides)
    (run / "model.safetensors").write_bytes(b"the original may go on meanwhile")
    retrofit(run, broken, 0.5, overrides)
    for name in ("model.safetensors", "state.safetensors", "teacher.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    facts = json.loads((whole / "recipe.json").read_text())
    assert facts["origin"]["name"] == "parity" and facts["origin"]["iteration"] == 20
    assert len(facts["origin"]["weights_sha256"]) == 64


@pytest.mark.parametrize("written", range(5))  # before: syncs of files and folders in turn
def test_a_disk_that_was_full_at_the_beginning_lets_the_same_command_begin_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    synced, calls = os.fsync, itertools.count()

    def full(file: int) -> None:
        if next(calls) == written:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(file)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", full)
        retrofit(run, tmp_path / "new", 0.1)
    retrofit(run, tmp_path / "new", 0.1)
    assert load_run(tmp_path / "new").facts["iteration"] == 2


def test_the_first_weights_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    """With a rate of almost nothing, the answers stay what they were."""
    retrofit(run, tmp_path / "new", 0.1, ["optim.lr=1e-12", "optim.weight_decay=0"])
    tokens = torch.randint(1, 20, (4, 9))
    before, after = load_run(run).model, load_run(tmp_path / "new").model
    torch.testing.assert_close(before(tokens, steps=4).logits, after(tokens, steps=4).logits)


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrofit", str(run), "--iterations", "0.1"]) == 0
    assert "run-any --steps 1,2,4" in capsys.readouterr().out
    assert load_run(run.with_name("run-any")).facts["iteration"] == 2
    assert main(["retrofit", str(run.parent / "nothing")]) == 2
    assert "is not a run" in capsys.readouterr().err
