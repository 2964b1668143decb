"""Killed at its worst moments: whoever comes next finds all that was finished, and clears up.

A sample of what `python -m benchmarks.kills` does a hundred times, at moments that chance seldom
finds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kills import forked
from serve.bundle import LATENCY_FILE, open_staging, read_bundle, seal_bundle, write_latency
from serve.bundle import folder as staging
from tests.fixtures.tiny_bundles import build_classify, build_generate, restage
from tests.fixtures.tiny_runs import tiny_label_recipe
from train.checkpoint import MODEL, STATE
from train.loop import train

ROOT = Path(__file__).parents[2]
# Later Pythons warn of forks beside threads; these begin nothing but what they are told.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def killed_at(name: str, module: object, call: Callable[[], object], times: int = 1) -> None:
    """Kill a fork of this process when it calls this function of a module the n-th time."""
    left = times

    def die(*_: object, **__: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*_, **__)

    original = getattr(module, name)
    setattr(module, name, die)
    try:
        child = forked(call)
    finally:
        setattr(module, name, original)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def hidden(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


@pytest.mark.parametrize("moment", ["exchange", "rmtree"])
def test_a_bundle_is_replaced_at_once_or_not_at_all(tmp_path: Path, moment: str) -> None:
    older = build_classify(tmp_path / "bundles" / "one", seed=1)
    newer = build_classify(tmp_path / "newer", seed=2)
    target, out = older.folder, older.folder.parent

    def replace() -> None:
        with open_staging(target) as folder:
            restage(newer, folder)
            seal_bundle(folder, newer.manifest, target)

    module = staging if moment == "exchange" else shutil
    killed_at(moment, module, replace)
    found = read_bundle(target).manifest.files
    assert found == (older if moment == "exchange" else newer).manifest.files
    assert len(hidden(out)) == 1
    replace()
    assert read_bundle(target).manifest.files == newer.manifest.files
    assert hidden(out) == []


def test_an_older_bundle_that_was_put_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two folders cannot change places in one step."""
    older = build_classify(tmp_path / "bundles" / "one")
    target = older.folder
    monkeypatch.setattr(staging, "exchange", lambda *_: False)

    def replace() -> None:
        with open_staging(target) as folder:
            restage(older, folder)
            seal_bundle(folder, older.manifest, target)

    killed_at("_rename", staging, replace)
    assert not target.exists()
    with open_staging(target):
        assert read_bundle(target).manifest == older.manifest
    assert hidden(target.parent) == []


def test_the_folder_of_a_writer_that_lives_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "one"
    with open_staging(target) as first:
        with open_staging(target) as second:
            assert first.is_dir() and second.is_dir() and first != second
        assert first.is_dir() and not second.exists()


def test_half_a_latency_is_removed_by_the_next(tmp_path: Path) -> None:
    bundle = build_generate(tmp_path / "one")
    latency = bundle.latency
    assert latency is not None
    before = (bundle.folder / LATENCY_FILE).read_bytes()
    killed_at("replace", os, lambda: write_latency(bundle.folder, latency))
    assert len(hidden(bundle.folder)) == 1
    assert read_bundle(bundle.folder) == bundle
    write_latency(bundle.folder, latency)
    assert hidden(bundle.folder) == []
    assert (bundle.folder / LATENCY_FILE).read_bytes() == before


@pytest.mark.parametrize("written", ["the first weights", "the last weights"])
@pytest.mark.long
def test_a_training_that_ends_between_the_files_of_its_checkpoint_goes_on(
    tmp_path: Path, written: str
) -> None:
    """The last checkpoint, too: its weights are written when there is nothing left to train."""
    recipe = tiny_label_recipe("optim.iterations=4", "run.checkpoint_every=4")
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(recipe, whole, quiet=True)
    times = 1 if written == "the first weights" else 2
    script = (
        "import json, os, pathlib, signal, sys\n"
        "from train.loop import train\nfrom train.recipe import recipe_from\n"
        "replace, left = pathlib.Path.replace, int(sys.argv[1])\n"
        "def dying(self, target):\n"
        "    global left\n"
        "    left -= target.name == 'model.safetensors'\n"
        "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return replace(self, target)\n"
        "pathlib.Path.replace = dying\n"
        "train(recipe_from(json.loads(sys.argv[2]), 'test'), pathlib.Path(sys.argv[3]), quiet=True)"
    )
    arguments = [str(times), json.dumps(recipe.to_json()), str(run)]
    killed = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert (run / MODEL).exists() == (times == 2)
    train(recipe, run, quiet=True)
    for name in (MODEL, STATE):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}
