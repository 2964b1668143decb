"""Trainings that are killed and resumed, again and again, until each is done.

A checkpoint is written after every iteration, so that many kills meet one that is being written.
Knows run folders; deliberately nothing of how the kills are reported.
"""

import json
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.killing import Found, job, made, whole
from train.checkpoint import METRICS, MODEL, STATE, RunError, load_run
from train.loop import read_metrics, train
from train.recipe import Recipe, load_recipe

_CORPUS = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 30
_SETTINGS = (
    *("model.width=16", "model.hidden=32", "model.heads=2", "model.layers=2", "model.window=24"),
    *("model.dropout=0.1", "optim.batch=8", "optim.warmup=2", "optim.precision=fp32"),
    *("steps.full=4", "steps.short=[1, 2]", "run.threads=1", "run.evaluate_batches=1"),
    *("optim.iterations=40", "run.checkpoint_every=1", "run.evaluate_every=10"),
)
_TIMED = ("tokens_per_s", "cpu_s")  # all else is the same in every run


def recipe_in(folder: Path) -> Recipe:
    """A decoder of characters that trains in a second."""
    corpus = folder / "corpus.txt"
    corpus.write_text(_CORPUS, encoding="utf-8")
    return load_recipe("shakespeare", list(_SETTINGS), str(corpus))


def kill_trainings(folder: Path, kills: int, seed: int) -> Found:
    """As many kills as are asked for; what was lost or wrong."""
    found, draw, begun_s = Found("training"), random.Random(seed), time.perf_counter()
    recipe = recipe_in(folder)
    reference, run = folder / "reference", folder / "run"
    made(partial(train, recipe, reference, quiet=True))
    clear = partial(shutil.rmtree, run, ignore_errors=True)
    killed = job(partial(train, recipe, run, quiet=True), _command(folder, run), clear)
    clear()
    before = 0
    while found.kills < kills:
        if killed.kill(draw, found.kills):
            found.kills += 1
        before = _check(run, reference, before, found)
        if before == recipe.optim.iterations and draw.random() < 0.5:
            # Killed as late as that, it has something to do still, or nothing: both must be right.
            found.expect(whole(killed.call) == 0, "it does not go on")
            _check_done(run, reference, found)
            clear()
            before = 0
    found.expect(whole(killed.call) == 0, "it does not go on")
    _check_done(run, reference, found)
    found.seconds = time.perf_counter() - begun_s
    return found


def _command(folder: Path, run: Path) -> list[str]:
    settings = [word for setting in _SETTINGS for word in ("--set", setting)]
    corpus = str(folder / "corpus.txt")
    return ["-m", "train", "train", "shakespeare", "--data", corpus, "--out", str(run), *settings]


def _check(run: Path, reference: Path, before: int, found: Found) -> int:
    """The iteration that the run has reached; no less than it had."""
    if not (run / STATE).is_file():
        found.expect(before == 0, f"the checkpoint of iteration {before} is gone")
        found.seen["before the first checkpoint"] += 1
        return before
    now = _iteration(run / STATE)
    found.expect(now >= before, f"iteration {now} where {before} was reached before")
    found.seen["with a checkpoint"] += 1
    if (run / MODEL).is_file():
        try:
            newest = load_run(run).facts["iteration"]
            found.expect(newest in (now, now - 1), f"weights of iteration {newest}, not {now}")
            found.seen["between its two files"] += newest != now
        except RunError as error:
            found.expect(False, str(error))
    logged = [record for record in _log(run) if record["iteration"] <= now]
    wanted = [record for record in _log(reference) if record["iteration"] <= now]
    found.expect(logged == wanted, f"{len(logged)} of {len(wanted)} records up to {now}")
    left = {path.name for path in run.glob(".*")} - {".lock"}
    found.seen["half a file left, for the next to replace"] += bool(left)
    return now


def _check_done(run: Path, reference: Path, found: Found) -> None:
    """It is what nobody has killed, byte for byte."""
    for name in (MODEL, STATE):
        same = (run / name).read_bytes() == (reference / name).read_bytes()
        found.expect(same, f"{name} is not that of a run that nobody killed")
    found.expect(_log(run) == _log(reference), "the log is not that of a run nobody killed")
    left = {path.name for path in run.iterdir()} - {path.name for path in reference.iterdir()}
    found.expect(not left, f"{', '.join(sorted(left))} was left behind")
    found.seen["runs that ended as if nobody had killed them"] += 1


def _log(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in _TIMED}
        for record in read_metrics(run / METRICS)
    ]


def _iteration(path: Path) -> int:
    """Of a checkpoint, from its header alone."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(header["__metadata__"]["iteration"])
