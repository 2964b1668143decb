"""A disk that fills up while something is written: what was there stays, nothing half is left."""

import subprocess
import sys
from pathlib import Path

import pytest

from serve.bundle import read_bundle
from tests.fixtures.tiny_bundles import build_classify
from tests.fixtures.tiny_runs import SHORT, TINY, tiny_label_recipe, tiny_label_run
from train.checkpoint import load_run
from train.loop import train

ROOT = Path(__file__).parents[2]
ADVICE = "free some space and give the same command again"
# A process whose files may not grow beyond this; the system says so as it does of a full disk.
LIMITED = (
    "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    "limit = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def limited(size: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(size), module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.long
def test_a_training_keeps_its_last_checkpoint_and_goes_on(tmp_path: Path) -> None:
    overrides = ("optim.iterations=12", "run.checkpoint_every=4")
    recipe = tiny_label_recipe(*overrides)
    train(recipe, tmp_path / "whole", quiet=True)
    # The first checkpoint has no moments yet, and fits; the second one does not.
    limit = (tmp_path / "whole" / "state.safetensors").stat().st_size - 1000
    run = tmp_path / "run"
    settings = [f"--set={one}" for one in (*TINY, "data.rows=400", *SHORT, *overrides)]
    full = limited(limit, "train", "train", "parity", "--out", str(run), *settings)
    assert full.returncode == 2 and ADVICE in full.stderr, full.stderr
    assert "Traceback" not in full.stderr
    assert load_run(run).facts["iteration"] == 0
    assert [path.name for path in run.glob(".*")] == [".lock"]
    train(recipe, run, quiet=True)
    for name in ("model.safetensors", "state.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.long
def test_an_export_leaves_the_older_bundle_and_nothing_else(tmp_path: Path) -> None:
    run = tiny_label_run(tmp_path)
    target = tmp_path / "bundles" / "one"
    older = build_classify(target)
    before = bytes_of(target)
    options = ("--out", str(target), "--steps", "1,2", "--samples", "8")
    full = limited(20_000, "export", "export", str(run), *options)
    assert full.returncode == 2 and ADVICE in full.stderr, full.stderr
    assert bytes_of(target) == before
    assert [path.name for path in target.parent.iterdir()] == ["one"]
    assert read_bundle(target) == older


def test_a_latency_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    bundle = build_classify(tmp_path / "one")
    before = bytes_of(bundle.folder)
    full = limited(500, "export", "calibrate", str(bundle.folder), "--threads", "1")
    assert full.returncode == 2 and ADVICE in full.stderr, full.stderr
    assert bytes_of(bundle.folder) == before
