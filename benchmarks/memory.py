"""What a training step holds in memory against its step count, with checkpointing and without.

Counts every allocation of PyTorch's CPU allocator over one forward and backward pass, each in a
process of its own. With checkpointing a step more should add one state, (B, N, D) in float32, and
hardly anything else. Models are made on the spot.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmarks.lab import ROOT, Cell, Provenance, Result, Table, Target, parser, run

NAME = "memory"
FEW, MANY = 2, 20
WANTED_RATIO = 1.2
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """A character decoder and a batch for it."""

    width: int
    layers: int
    window: int
    batch: int

    @property
    def state_bytes(self) -> int:
        return self.batch * self.window * self.width * 4


SIZE, QUICK = Size(width=192, layers=3, window=256, batch=8), Size(32, 2, 64, 4)


class Allocated(NamedTuple):
    """Bytes beyond what was held before."""

    peak: int
    kept: int  # still held at the end, by what the call returned


def allocated(call: Callable[[], object]) -> Allocated:
    """What a call allocates, as PyTorch's profiler counts it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        result = call()
    assert made.profiler is not None
    peak = held = 0
    for event in made.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return Allocated(peak, held)


def training_peak(size: Size, steps: int, checkpoint: bool) -> int:
    """Peak bytes of one forward and backward pass."""
    import torch

    from train.data.batch import Sizes
    from train.model import build_model
    from train.objective import task_loss
    from train.recipe import ModelConfig

    torch.manual_seed(0)
    config = ModelConfig(
        "decoder",
        width=size.width,
        layers=size.layers,
        hidden=4 * size.width,
        window=size.window,
    )
    model = build_model(config, Sizes(vocabulary=65))
    model.checkpoint = checkpoint
    tokens = torch.randint(65, (size.batch, size.window))

    def step() -> None:
        output = model(tokens, steps=steps)
        (task_loss(output.logits, tokens) + 0.1 * output.cost).backward()

    step()  # gradients are there from now on, as in any training step but the first
    return allocated(step).peak


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--one", nargs=2, type=int, metavar="INT", help=_ONE)
    parsed = made.parse_args(arguments)
    size = QUICK if parsed.quick else SIZE
    if parsed.one:
        steps, checkpoint = parsed.one
        print(json.dumps(training_peak(size, steps, bool(checkpoint))))
        return 0
    return run(NAME, arguments, parsed, partial(measure, size, parsed.quick))


_ONE = "measure only these steps, with (1) or without (0) checkpointing, and print the bytes"


def measure(size: Size, quick: bool, provenance: Provenance) -> Result:
    rows: list[Sequence[Cell]] = []
    growth = {}
    for checkpoint in (True, False):
        peaks = {steps: _in_own_process(steps, checkpoint, quick) for steps in (FEW, MANY)}
        added = (MANY - FEW) * size.state_bytes
        growth[checkpoint] = (peaks[MANY] - peaks[FEW]) / added
        rows.append(
            [
                "yes" if checkpoint else "no",
                peaks[FEW] / MEBIBYTE,
                peaks[MANY] / MEBIBYTE,
                added / MEBIBYTE,
                growth[checkpoint],
            ]
        )
    columns = (
        "checkpointing",
        f"peak at {FEW} steps, MiB",
        f"peak at {MANY} steps, MiB",
        "states added, MiB",
        "growth over the states added",
    )
    about = (
        f"Peak of PyTorch's allocations in a forward and backward pass of a character decoder: "
        f"{size.layers} layers, width {size.width}, {size.batch} rows of {size.window} tokens, "
        f"float32. A state has {size.state_bytes} bytes."
    )
    what = f"growth of the peak from {FEW} to {MANY} steps with checkpointing, of the states added"
    return provenance.result(
        NAME,
        "Memory of training against steps",
        about,
        [Table("Each peak is of a process of its own.", columns, rows)],
        [Target(what, growth[True], "<=", WANTED_RATIO, "times")],
    )


def _in_own_process(steps: int, checkpoint: bool, quick: bool) -> int:
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--one", str(steps)]
    command += [str(int(checkpoint)), *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
