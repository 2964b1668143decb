"""Exports that are killed: each leaves no bundle, or a whole one, and the next one succeeds.

Most forks begin behind the tracing of the model, which writes nothing and takes longest. A process
of its own opens what is there as a server does. Knows bundles; deliberately nothing of reports.
"""

import random
import shutil
import time
from functools import partial
from pathlib import Path
from unittest import mock

from benchmarks.corruption import Victim
from benchmarks.killed_training import recipe_in
from benchmarks.killing import Found, job, made, whole
from export.run import ExportRequest, export_run
from export.trace import trace
from export.verify import samples_of
from serve.bundle import MANIFEST_FILE
from train.checkpoint import load_run
from train.data import open_dataset
from train.loop import train

_STEPS, _SAMPLES = (1, 2), 16
_WHOLE_EVERY = 5


def kill_exports(folder: Path, kills: int, seed: int) -> Found:
    """As many kills as are asked for; what was half made, lost, or in the way of the next."""
    found, draw, begun_s = Found("export"), random.Random(seed), time.perf_counter()
    recipe = recipe_in(folder)
    run = folder / "run"
    made(partial(train, recipe, run, quiet=True))
    _trace_once(run)
    out = folder / "bundles"
    target = out / "model"
    request = ExportRequest(target, _STEPS, samples=_SAMPLES)
    clear = partial(shutil.rmtree, out, ignore_errors=True)
    killed = job(partial(export_run, run, request), _command(run, target), clear)
    with Victim() as victim:
        answer = str(victim.open(target)["answer"])
        while found.kills < kills:
            there = draw.random() < 0.5
            if not there:
                shutil.rmtree(target, ignore_errors=True)
            there = target.exists()
            if killed.kill(draw, found.kills):
                found.kills += 1
            _check(out, target, there, answer, victim, found)
            if found.kills % _WHOLE_EVERY == 0:
                found.expect(whole(killed.call) == 0, "the next export fails")
                left = {path.name for path in out.iterdir()} - {target.name}
                found.expect(not left, f"{', '.join(sorted(left))} was left behind")
                found.expect(_opened(victim, target) == answer, "the next export is no good")
                found.seen["exports afterwards that left only a bundle"] += 1
    found.seconds = time.perf_counter() - begun_s
    return found


def _trace_once(run: Path) -> None:
    """Let the forks of this process find the model traced."""
    model, recipe, tokenizer, _ = load_run(run)
    samples = samples_of(
        open_dataset(recipe, tokenizer), recipe.model.window, recipe.model.target_window
    )
    traced = trace(model, samples.draw(2, 3), samples.draw(3, 5))
    mock.patch("export.run.trace", lambda *_: traced).start()


def _command(run: Path, target: Path) -> list[str]:
    steps = ",".join(map(str, _STEPS))
    options = ["--out", str(target), "--steps", steps, "--samples", str(_SAMPLES)]
    return ["-m", "export", "export", str(run), *options]


def _check(out: Path, target: Path, there: bool, answer: str, victim: Victim, found: Found) -> None:
    if target.exists():
        found.expect(_opened(victim, target) == answer, "the bundle is no good")
        found.seen["with a whole bundle"] += 1
    else:
        found.expect(not there, "the bundle that was there before is gone")
        found.seen["without a bundle"] += 1
    for left in (path for path in out.iterdir() if path != target):
        found.expect(left.name.startswith("."), f"{left.name} can be seen")
        # A trial is sealed with figures that are not measured yet, and is never given out.
        if (left / MANIFEST_FILE).exists() and ".trial." not in left.name:
            taken = _opened(victim, left)
            found.expect(taken in (answer, None), "half a bundle is taken for one")
        found.seen["hidden folders, which the next one removes"] += 1


def _opened(victim: Victim, folder: Path) -> str | None:
    """What a server would answer with; None if it refuses the folder."""
    came = victim.open(folder)
    if came["outcome"] == "refused":
        return None
    return str(came.get("answer", came["outcome"]))
