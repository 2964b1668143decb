"""Run folders of other releases, and damaged ones: read as far as that makes sense, else named."""

import json
from pathlib import Path

import pytest

from tests.fixtures.tiny_runs import tiny_label_recipe, tiny_label_run
from train.checkpoint import RunError, load_run
from train.loop import train

BRIEF = ("optim.iterations=2", "run.evaluate_every=2")


def test_a_run_of_an_older_release_goes_on_with_the_defaults_of_newer_settings(
    tmp_path: Path,
) -> None:
    run = tiny_label_run(tmp_path, *BRIEF)
    path = run / "recipe.json"
    facts = json.loads(path.read_text())
    del facts["recipe"]["steps"]["jump"], facts["recipe"]["run"]
    path.write_text(json.dumps(facts))
    train(tiny_label_recipe(*BRIEF), run, quiet=True)
    facts["sizes"]["of_a_later_release"] = 3
    path.write_text(json.dumps(facts))
    with pytest.raises(RunError, match=r"recipe\.json is damaged .*of_a_later_release"):
        load_run(run)


def test_damaged_weights_beside_a_whole_checkpoint_are_written_again(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path, *BRIEF)
    whole = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(b"")
    train(tiny_label_recipe(*BRIEF), run, quiet=True)
    assert (run / "model.safetensors").read_bytes() == whole
    (run / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match=r"tokenizer\.json is damaged"):
        load_run(run)
