"""Seconds, memory and disk of an export, with all rungs and with one.

    python -m benchmarks.export_time

The model is the reference decoder with random weights; each export is verified, in a process of
its own. Without calibration: neither latency nor quality is measured. Beside it stands what an
export takes that measures quality on two rows, the least that give an interval. The time is that
of the whole process, from the start of Python, and what of its processor time went where.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, get_args

from benchmarks.lab import ROOT, Cell, Provenance, Result, Table, Target, parser, run
from benchmarks.served_memory import folder_bytes
from serve.bundle import Precision, Quality

NAME = "export_time"
WANTED_S, WANTED_GB, WANTED_RATIO = 20.0, 1.5, 1.05
STAGES = (
    *("load_exporter", "trace", "write_graphs", "expect"),
    *("verify_rung", "measure_rung", "verify_mix", "compare"),
)


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--one", choices=get_args(Precision), help="export only in this precision")
    made.add_argument("--steps", type=int, nargs="+", metavar="INT", help="with these rungs")
    made.add_argument("--measured", action="store_true", help="and their quality on two rows")
    parsed = made.parse_args(arguments)
    if parsed.one is not None:
        steps = tuple(parsed.steps)
        print(json.dumps(_export(parsed.one, steps, parsed.quick, parsed.measured)))
        return 0
    return run(NAME, arguments, parsed, partial(measure, parsed.quick))


def measure(quick: bool, provenance: Provenance) -> Result:
    # Here, not above: each export pays for its own imports.
    from benchmarks import reference

    steps = reference.QUICK_STEPS if quick else reference.STEPS
    rows: list[Sequence[Cell]] = []
    targets: list[Target] = []
    for precision in reference.PRECISIONS[: 1 if quick else None]:
        whole = _in_own_process(precision, steps, quick)
        measured = _in_own_process(precision, steps, quick, "--measured")
        alone = _in_own_process(precision, steps[-1:], quick)
        rows += [
            _row(precision, f"{len(steps)}", whole),
            _row(precision, f"{len(steps)}, quality on two rows", measured),
            _row(precision, "1", alone),
        ]
        what = f"{len(steps)} rungs, {precision}"
        ratio = whole["bytes"] / alone["bytes"]
        targets += [
            Target(f"{what}: the whole process", whole["wall_s"], "<=", WANTED_S, "s"),
            Target(f"{what}: peak memory", measured["peak_bytes"] / 1e9, "<=", WANTED_GB, "GB"),
            Target(f"{what}: on disk, of the largest alone", ratio, "<=", WANTED_RATIO, "times"),
        ]
    columns = (
        *("precision", "rungs", "wall s", "cpu s", "imports, model", *STAGES),
        *("the rest", "peak, MB", "on disk, MB"),
    )
    caption = (
        "The stages are seconds of the processor, of the threads that ran them; two rungs are "
        "verified and measured at once."
    )
    return provenance.result(
        NAME,
        "Exporting",
        f"The reference decoder, rungs of {', '.join(map(str, steps))} steps or of the last of "
        "these alone, verified, without calibration.",
        [Table(caption, columns, rows)],
        targets,
    )


def _row(precision: str, rungs: str, found: Mapping[str, Any]) -> list[Cell]:
    stages = [found["stages_s"].get(name, 0.0) for name in ("before", *STAGES)]
    rest_s = found["cpu_s"] - sum(stages)
    sizes = (found["peak_bytes"] / 1e6, found["bytes"] / 1e6)
    return [precision, rungs, found["wall_s"], found["cpu_s"], *stages, rest_s, *sizes]


def _in_own_process(
    precision: str, steps: Sequence[int], quick: bool, *options: str
) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--one", precision, *options]
    command += ["--steps", *map(str, steps), *(["--quick"] if quick else [])]
    begun_s = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"wall_s": time.perf_counter() - begun_s}


def _export(
    precision: Precision, steps: tuple[int, ...], quick: bool, measured: bool
) -> dict[str, Any]:
    """Export once; what that took of this process."""
    import numpy as np

    from benchmarks import reference
    from export import run as pack
    from export import run as trial
    from export.draft import UNCOMPARED
    from export.quality import Measured
    from export.verify import Answers

    origin = reference.decoder(quick)
    if not measured:
        same = Measured(Quality("loss", 0.0, 0.0, 0.0, 1), np.zeros(2))  # the bundle is deleted
        for name, found in (("measure_rung", same), ("compare", (same, UNCOMPARED))):
            setattr(trial, name, partial(_given, found))
    stages_s = defaultdict[str, float](float, before=time.process_time())
    for owner in (pack, trial, Answers):
        for name in STAGES:
            if hasattr(owner, name):
                _clock(owner, name, stages_s)
    with tempfile.TemporaryDirectory() as folder:
        request = pack.ExportRequest(
            Path(folder) / "bundle", steps, precision=precision, samples=1, latency=False
        )
        bundle = pack.export_model(origin, request, say=lambda _: None)
        size_bytes = folder_bytes(bundle)
    return {
        "stages_s": stages_s,
        "cpu_s": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes": size_bytes,
    }


def _given(found: object, *_: object) -> object:
    return found


def _clock(owner: object, name: str, spent_s: defaultdict[str, float]) -> None:
    """Add up the processor time of all calls of a function of a module or class."""
    called, lock = getattr(owner, name), Lock()

    def clocked(*arguments: Any, **named: Any) -> Any:
        begun_s = time.thread_time()
        try:
            return called(*arguments, **named)
        finally:
            with lock:
                spent_s[name] += time.thread_time() - begun_s

    setattr(owner, name, clocked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
