"""Does a server survive damaged bundles? Copies of bundles are damaged at random, and opened.

After an accident (hashes and seal stay as they were) a bundle is refused with an error that names
the file or the field, or what it answers is bit for bit what it was. Where the hashes were made to
fit again, answers may be any; but nothing crashes, hangs or takes endless memory. It deliberately
opens bundles in another process, which may die of one.
"""

import json
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from benchmarks.damage import (
    ACCIDENTS,
    Damage,
    edit_manifest,
    edit_tokenizer,
    flip_bits,
    mix,
    reseal,
    swap,
    truncate,
)
from benchmarks.graph_damage import edit_graph
from benchmarks.machine import ROOT
from benchmarks.options import ZOO, parser, run
from benchmarks.result import Cell, Provenance, Result, Table, Target

NAME = "corruption"
GOLDEN = ROOT / "tests" / "golden"
CASES, QUICK_CASES = 1000, 20
# By a clock on the wall, so it allows for a busy machine.
LIMIT_S = 60.0
# Resealed ones are opened in earnest, which takes seconds with large weights.
SMALL_BYTES = 1 << 20
RESEALED: Sequence[Damage] = (
    *(flip_bits, flip_bits, truncate, swap, mix, edit_tokenizer),
    *(edit_manifest, edit_manifest, edit_manifest, edit_graph, edit_graph, edit_graph),
)
ENDINGS = ("refused", "same answers", "other answers", "fails when asked", "FAILED")


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged bundle, and how it ended."""

    index: int
    bundle: str
    resealed: bool
    kind: str
    done: str
    ending: str
    why: str = ""


@final
class Victim:
    """The process that opens bundles; a new one whenever it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.peak_kib = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def open(self, folder: Path) -> dict[str, Any]:
        """What came of a bundle."""
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead already, which shows below
            process.stdin.write(json.dumps(str(folder)).encode() + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            self._end()
            return {"outcome": "died", "message": f"no answer after {LIMIT_S:g} s"}
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self._end()
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            return {"outcome": "died", "message": f"ended by {name}"}
        found: dict[str, Any] = json.loads(line)
        self.peak_kib = max(self.peak_kib, found["peak_kib"])
        return found

    def kill(self) -> None:
        """Let it die where it is, as of a bundle."""
        if self._process is not None:
            self._process.kill()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.victim"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=nowhere)


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    made.add_argument("--count", type=int, default=CASES, metavar="INT", help="cases (1000)")
    made.add_argument("--seed", type=int, default=0, metavar="INT", help="of all chance (0)")
    made.add_argument("--only", type=int, metavar="INT", help="run this case only, and print it")
    parsed = made.parse_args(arguments)
    folders = [path.resolve() for path in parsed.bundles or kept_bundles()]
    if parsed.only is not None:
        print(attempt(folders, parsed.seed, [parsed.only])[0][0])
        return 0
    count = QUICK_CASES if parsed.quick else parsed.count
    return run(NAME, arguments, parsed, partial(measure, folders, parsed.seed, count))


def kept_bundles() -> list[Path]:
    """The bundles of the zoo and the golden ones."""
    found = [*ZOO.glob("*/manifest.json"), *GOLDEN.glob("*/*/manifest.json")]
    return sorted(path.parent for path in found)


def attempt(folders: Sequence[Path], seed: int, indices: Sequence[int]) -> tuple[list[Case], int]:
    """These cases, and the peak memory of a process that opened them, in KiB."""
    with Victim() as victim, tempfile.TemporaryDirectory() as scratch:
        before = {folder: _sound(victim, folder) for folder in folders}
        cases = []
        for index in indices:
            draw = random.Random(f"{seed}/{index}")
            case = _attempt_one(victim, before, index, draw, Path(scratch) / "bundle")
            cases.append(case)
            if case.ending == "FAILED":
                print(f"FAILED --seed {seed} --only {index}: {case}", file=sys.stderr, flush=True)
    return cases, victim.peak_kib


def _sound(victim: Victim, folder: Path) -> str:
    found = victim.open(folder)
    if found["outcome"] != "answered":
        raise SystemExit(f"{folder} cannot be opened before any damage: {found['message']}")
    return str(found["answer"])


def _attempt_one(
    victim: Victim, before: dict[Path, str], index: int, draw: random.Random, copy: Path
) -> Case:
    resealed = draw.random() < 0.5
    folders = [folder for folder in before if not resealed or _bytes(folder) < SMALL_BYTES]
    folder = draw.choice(folders)
    damage = draw.choice(RESEALED if resealed else ACCIDENTS)
    others = [other for other in before if other != folder] or [folder]
    shutil.copytree(folder, copy)
    done = damage(copy, draw, others)
    if resealed:
        reseal(copy)
    found = victim.open(copy)
    if copy.is_symlink():
        copy.unlink()
    shutil.rmtree(copy)
    ending, why = judge(found, before[folder], resealed)
    return Case(index, folder.name, resealed, damage.__name__, done, ending, why)


def judge(found: dict[str, Any], before: str, resealed: bool) -> tuple[str, str]:
    """How a case ended, and what was said."""
    message = str(found.get("message", ""))
    match found["outcome"]:
        case "refused" if found["named"] and (resealed or found["stage"] == "loading"):
            return "refused", message
        case "answered" if found["answer"] == before:
            return "same answers", ""
        case "answered" if resealed:
            return "other answers", ""
        case "raised" if resealed and found["stage"] == "answering":
            return "fails when asked", message
    return "FAILED", message


def measure(folders: Sequence[Path], seed: int, count: int, provenance: Provenance) -> Result:
    cases, peak_kib = attempt(folders, seed, range(count))
    tables = [
        _table("Hashes and seal as they were", [case for case in cases if not case.resealed]),
        _table("Hashes and seal made to fit again", [case for case in cases if case.resealed]),
    ]
    failed = [case for case in cases if case.ending == "FAILED"]
    if failed:
        columns = ("case", "bundle", "damage", "what came of it")
        rows: list[Sequence[Cell]] = [
            [case.index, case.bundle, case.done[:200], case.why[:200]] for case in failed
        ]
        tables.append(Table("Failed", columns, rows))
    accidents = [case for case in cases if not case.resealed]
    harmless = sum(case.ending in ("refused", "same answers") for case in accidents)
    bad = sum(case.resealed for case in failed)
    return provenance.result(
        NAME,
        "Damaged bundles",
        f"{count} copies of {len(folders)} bundles, each damaged once at random (seed {seed}), "
        "then read, opened, warmed up and asked as a server does it. Greatest resident memory of "
        f"the process that opens them: {peak_kib / 1024:.0f} MiB.",
        tables,
        [
            Target(
                "accidents that are refused by name, or change no answer",
                harmless,
                "==",
                len(accidents),
            ),
            Target("resealed ones that crash, hang, or fail without a clear error", bad, "==", 0),
        ],
    )


def _table(caption: str, cases: Sequence[Case]) -> Table:
    rows: list[Sequence[Cell]] = []
    for kind in sorted({case.kind for case in cases}):
        ended = Counter(case.ending for case in cases if case.kind == kind)
        rows.append([kind.replace("_", " "), ended.total(), *(ended[one] for one in ENDINGS)])
    total = Counter(case.ending for case in cases)
    rows.append(["all", len(cases), *(total[one] for one in ENDINGS)])
    return Table(caption, ("damage", "cases", *ENDINGS), rows)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
