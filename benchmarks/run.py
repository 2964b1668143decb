"""Runs the benchmarks, each in a process of its own, and writes RESULTS.md from what they kept.

    python benchmarks/run.py [NAME ...] [--quick]
    python benchmarks/run.py --page                   # measure nothing, write RESULTS.md again

Results of scripts that are not run here are shown as well.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.lab import BASELINES, NOTHING_TO_MEASURE, RESULTS, ROOT, Result, quiet_machine
from benchmarks.summary import summary

SCRIPTS = (
    *("quality", "precision", "export_time", "served_memory", "dial", "decode"),
    *("classify_speed", "deadlines", "refusals", "batching"),
    *("bare_fastapi", "throughput", "soak", "departures", "swaps", "drains"),
    *("first_answer", "oip_conformance", "conformance", "queueing"),
)
# What installs packages takes minutes however quick the rest is.
_NEVER_QUICK = ("first_answer",)
_SERVES_ZOO = ("first_answer",)
# Kept of other bundles than the zoo's, of plain models or with data: all at once would keep less.
_KEPT_OF_MORE = ("quality", "precision", "dial", "deadlines")
PAGE = RESULTS.parent / "RESULTS.md"
_HEAD = """# Measured results

Written by `make bench` from `benchmarks/results/*.json`; do not edit. Every section names the
command that repeats it, the commit, the date and the machine. Machines are noisy: compare medians
and ratios within a section, not milliseconds between sections.

`sentiment` and `topics` were replaced on 28 November 2026: those of today have three steps.
All sections of an earlier date are of the models before.
"""


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.names) - set(SCRIPTS)
    if unknown:
        parser.error(f"no benchmark is named {min(unknown)}: there are {', '.join(SCRIPTS)}")
    left_out = parsed.skip if parsed.quick else [*parsed.skip, *_KEPT_OF_MORE]
    names = parsed.names or [name for name in SCRIPTS if name not in left_out]
    if parsed.page:
        write_page(RESULTS, PAGE)
        return 0
    if not parsed.quick:
        with quiet_machine(parsed.beside_trainings):
            pass  # each script asks again, and keeps trainings from going on while it measures
    if parsed.quick:
        with tempfile.TemporaryDirectory() as folder:
            long = [] if parsed.names else [one for one in names if one in _NEVER_QUICK]
            ended = _run([one for one in names if one not in long], parsed, Path(folder))
            print(render_page(read_results(Path(folder))))
        for name in long:
            print(f"left out, since it is never quick: {name}")
    else:
        ended = _run(names, parsed, RESULTS)
        write_page(RESULTS, PAGE)
        if not parsed.names:
            print(
                f"left out: {', '.join(_KEPT_OF_MORE)}. RESULTS.md names the command of each, "
                "and `python -m benchmarks.readme --measure` takes those that the README states"
            )
    return _verdict(ended, set(parsed.names))


def _verdict(ended: Mapping[str, int], asked_for: set[str]) -> int:
    """Name what was not measured; 1 if that is a failure, as it is of what was asked for."""
    status = 0
    for name, code in ended.items():
        if code == NOTHING_TO_MEASURE and name not in asked_for:
            print(f"LEFT OUT, it lacks what it measures (see above): {name}", file=sys.stderr)
        elif code:
            print(f"FAILED, nothing was measured: {name}", file=sys.stderr)
            status = 1
    return status


def read_results(folder: Path) -> list[Result]:
    """All that was kept, in the order of the scripts, then by name."""
    kept = [path for path in folder.glob("*.json") if path.name != BASELINES.name]
    results = [Result.read(path) for path in kept]

    def place(result: Result) -> tuple[int, str]:
        known = result.name in SCRIPTS
        return (SCRIPTS.index(result.name) if known else len(SCRIPTS)), result.name

    return sorted(results, key=place)


def render_page(results: Iterable[Result]) -> str:
    """The text of RESULTS.md."""
    shown = list(results)
    first = summary({result.name: result for result in shown})
    return "\n".join([_HEAD, *([first] if first else []), *(result.markdown for result in shown)])


def write_page(folder: Path, page: Path) -> None:
    """Write RESULTS.md, and say which targets were missed."""
    results = read_results(folder)
    page.write_text(render_page(results), encoding="utf-8")
    print(f"\nwritten: {page}")
    for result in results:
        for target in result.targets:
            if not target.met:
                print(f"MISSED in {result.name}: {target.what}")


def _run(names: Sequence[str], parsed: argparse.Namespace, folder: Path) -> dict[str, int]:
    """Run these one after the other; the exit status of each."""
    ended = {}
    for name in names:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if parsed.quick:
            command += ["--quick"]
        if parsed.beside_trainings:
            command += ["--beside-trainings"]
        if folder != RESULTS:
            command += ["--results", str(folder)]
        if parsed.bundles and name not in _SERVES_ZOO:
            command += ["--bundles", *(str(one.resolve()) for one in parsed.bundles)]
        print(f"\n===== {name} =====", flush=True)
        begun_s = time.perf_counter()
        ended[name] = subprocess.run(command, cwd=ROOT, check=False).returncode
        print(f"({name} took {time.perf_counter() - begun_s:.0f} s)", flush=True)
    return ended


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    listed = ", ".join(SCRIPTS)
    made.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to run: {listed} (default: everything)"
    )
    made.add_argument(
        "--skip", nargs="+", choices=SCRIPTS, metavar="NAME", default=[], help="what not to run"
    )
    made.add_argument(
        "--bundles",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="bundles to measure (default: those of the zoo)",
    )
    made.add_argument(
        "--quick", action="store_true", help="only show that it works, and keep nothing"
    )
    made.add_argument(
        "--beside-trainings", action="store_true", help="measure even while a queue trains here"
    )
    made.add_argument(
        "--page", action="store_true", help="measure nothing: only write RESULTS.md again"
    )
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
