"""The command line that all scripts share, and the bundles that it names.

Knows flags and folders; what is done with them is each script's own affair.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.quiet import quiet_machine
from benchmarks.result import RESULTS, Provenance, Result
from serve.bundle import Bundle, Task, read_bundle

ZOO = ROOT / "zoo"
# The exit status of a script that lacks what it measures, and said what that is.
NOTHING_TO_MEASURE = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What every script is told."""

    bundles: tuple[Path, ...]
    quick: bool

    def read(self, task: Task | None = None) -> list[Bundle]:
        """The bundles, or those of one task; SystemExit if there is none."""
        found = [read_bundle(folder) for folder in self.bundles]
        chosen = [one for one in found if task is None or one.manifest.task == task]
        if not chosen:
            wanted = f"that can {task} " if task else ""
            raise SystemExit(
                f"there is no bundle {wanted}to measure: name one with --bundles FOLDER ..."
            )
        return chosen


def parser(about: str) -> argparse.ArgumentParser:
    """A parser with the shared flags; a script may add its own."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument(
        "--bundles",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="bundles to measure (default: those of the zoo that take text)",
    )
    made.add_argument(
        "--quick", action="store_true", help="only show that it works; the figures mean nothing"
    )
    made.add_argument(
        "--beside-trainings", action="store_true", help="measure even while a queue trains here"
    )
    made.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="folder to keep the JSON in (default: benchmarks/results, and none with --quick)",
    )
    return made


def options(parsed: argparse.Namespace) -> Options:
    """The shared part of a parsed command line."""
    return Options(bundles=tuple(parsed.bundles or text_bundles()), quick=parsed.quick)


def text_bundles() -> list[Path]:
    """Those of the zoo that the callers of the scripts, which send texts, can ask."""
    folders = sorted(path.parent for path in ZOO.glob("*/manifest.json"))
    return [one for one in folders if read_bundle(one).manifest.input.kind == "text"]


def run(
    name: str,
    arguments: Sequence[str],
    parsed: argparse.Namespace,
    measure: Callable[[Provenance], Result],
) -> int:
    """Measure, print, keep; the exit status of a script. Quick figures may be of a busy machine."""
    with nullcontext() if parsed.quick else quiet_machine(parsed.beside_trainings):
        result = measure(Provenance.now(name, arguments))
    print(result.text)
    folder = parsed.results or (None if parsed.quick else RESULTS)
    if folder is not None:
        print(f"\nkept in {result.write(folder)}")
    return 0
