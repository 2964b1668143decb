"""What every benchmark shares: its command line, a quiet machine, fair rounds, and the result it
keeps.

A result names the command, the commit, the date and the machine, and no host, user or folder.
"""

import argparse
import fcntl
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Literal, NamedTuple, Self, TypeVar

from export.latency import cpu_name
from serve.bundle import Bundle, Task, read_bundle
from serve.runtime.session import usable_cores

# What a figure was measured on: the processor, its memory, the software, the commit, the date. It
# names no host, user or folder, so that results can be published as they are.


ROOT = Path(__file__).resolve().parent.parent
# What the benchmarks write themselves does not make the measured code another one.
_OWN_OUTPUTS = (
    "benchmarks/results",
    "benchmarks/RESULTS.md",
    "benchmarks/papers/measured",
    "benchmarks/papers/screened",
    "benchmarks/papers/*.json",
    "benchmarks/papers/plots",
    "benchmarks/papers/README.md",
    "docs/results.md",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and the software that ran."""

    cpu: str
    cores: int
    memory_gb: float
    system: str
    python: str
    onnxruntime: str
    load: float  # mean number of busy processes in the minute before: 0 on a machine at rest

    @property
    def sentence(self) -> str:
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory_gb:g} GB; {self.system}; "
            f"Python {self.python}, onnxruntime {self.onnxruntime}; "
            f"load average {self.load:.1f} at the start"
        )


def this_machine() -> Machine:
    """The machine as it is now."""
    return Machine(
        cpu=cpu_name(),
        cores=usable_cores(),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        onnxruntime=_version("onnxruntime"),
        load=round(os.getloadavg()[0], 2),
    )


def commit() -> str:
    """The commit that is measured, with -dirty when the work tree differs from it."""
    head = _git("rev-parse", "--short", "HEAD")
    if head is None:
        return "none"
    excluded = [f":(exclude){path}" for path in _OWN_OUTPUTS]
    changed = _git("status", "--porcelain", "--", ".", *excluded)
    return head if changed == "" else f"{head}-dirty"


def today() -> str:
    """The time, to the minute, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def command_line(module: str, arguments: Sequence[str]) -> str:
    """The command to repeat a measurement; folders elsewhere keep only their last name."""
    return " ".join(["python -m", module, *map(_without_folders, arguments)])


def _without_folders(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if equals:
        return f"{name}={_without_folders(value)}"
    path = Path(argument)
    if not path.is_absolute():
        return argument
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f".../{path.name}"


def _git(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


RESULTS = Path(__file__).resolve().parent / "results"
# Written by baselines.py over several runs, in a form of its own; quality.py shows what it says.
BASELINES = RESULTS / "baselines.json"
SCHEMA_VERSION = 1

Cell = str | int | float | None
Relation = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of measured values under a caption; numbers stay unrounded here."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.caption}: {len(row)} cells under {len(self.columns)}")


@dataclass(frozen=True, slots=True)
class Target:
    """A measured value beside what it should be."""

    what: str
    value: float
    relation: Relation
    wanted: float
    unit: str = ""

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return f"{format_cell(self.value)} {self.unit}".rstrip()

    @property
    def met(self) -> bool:
        if self.relation == "<=":
            return self.value <= self.wanted
        return self.value >= self.wanted if self.relation == ">=" else self.value == self.wanted


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that one run of one script found."""

    name: str
    title: str
    about: str
    command: str
    commit: str
    date: str
    machine: Machine
    tables: Sequence[Table]
    targets: Sequence[Target]

    def write(self, folder: Path = RESULTS) -> Path:
        """Keep it as NAME.json."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        record = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` kept."""
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"{path} is of another schema version: measure again")
        record["machine"] = Machine(**record["machine"])
        record["tables"] = [Table(**table) for table in record["tables"]]
        record["targets"] = [Target(**target) for target in record["targets"]]
        return cls(**record)

    @property
    def markdown(self) -> str:
        """A section of RESULTS.md."""
        parts = [f"## {self.title}", self.about]
        parts += [f"{table.caption}\n\n{markdown_table(table)}" for table in self.tables]
        if self.targets:
            parts.append(markdown_table(_figure_table(self.targets)))
        parts.append(
            f"`{self.command}` at {self.commit}, {self.date}.\nMachine: {self.machine.sentence}."
        )
        return "\n\n".join(parts) + "\n"

    @property
    def text(self) -> str:
        """The same for a terminal."""
        parts = [self.title, self.about]
        parts += [f"{table.caption}\n{text_table(table)}" for table in self.tables]
        if self.targets:
            parts.append(text_table(_target_table(self.targets)))
        parts.append(f"{self.command}\nat {self.commit}, {self.date}\n{self.machine.sentence}")
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a measurement was started; taken before it begins, so that the load is not its own."""

    command: str
    commit: str
    date: str
    machine: Machine

    @classmethod
    def now(cls, name: str, arguments: Sequence[str]) -> Self:
        return cls(
            command=command_line(f"benchmarks.{name}", arguments),
            commit=commit(),
            date=today(),
            machine=this_machine(),
        )

    def result(
        self,
        name: str,
        title: str,
        about: str,
        tables: Sequence[Table],
        targets: Sequence[Target],
    ) -> Result:
        """A result that was measured from here on."""
        return Result(
            name, title, about, self.command, self.commit, self.date, self.machine, tables, targets
        )


def format_cell(cell: Cell) -> str:
    """A value with the digits that mean something."""
    match cell:
        case None:
            return "–"
        case str() | int():
            return str(cell)
    size = abs(cell)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{cell:.0f}"
    if size >= 10:
        return f"{cell:.1f}"
    return f"{cell:.2f}" if size >= 1 else f"{cell:.4f}" if size < 0.1 else f"{cell:.3f}"


def _figure_table(targets: Sequence[Target]) -> Table:
    """What was found, for readers: what was hoped for is the developers' own affair."""
    return Table("Figures", ("in short", "measured"), [[one.what, one.shown] for one in targets])


def _target_table(targets: Sequence[Target]) -> Table:
    rows: list[list[Cell]] = []
    for target in targets:
        unit = f" {target.unit}" if target.unit else ""
        wanted = f"{target.relation} {target.wanted:g}{unit}"
        rows.append([target.what, wanted, target.shown, "met" if target.met else "MISSED"])
    return Table("Targets", ("target", "wanted", "measured", ""), rows)


def markdown_table(table: Table) -> str:
    numeric = [
        all(not isinstance(row[index], str) for row in table.rows)
        for index in range(len(table.columns))
    ]
    lines = [
        "| " + " | ".join(table.columns) + " |",
        "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
    ]
    lines += ["| " + " | ".join(map(format_cell, row)) + " |" for row in table.rows]
    return "\n".join(lines)


def text_table(table: Table) -> str:
    cells = [list(table.columns), *(list(map(format_cell, row)) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


# Whether trainings run on this machine: benchmarks do not time anything beside them unnoticed.
# One file, in the machine's temporary folder, has a lock that trainings share and that a
# benchmark has alone. Locks go with their process, however it ends. A second file asks them to
# pause.


FOLDER = "STEPDIAL_QUEUE_FOLDER"  # a variable that puts the files elsewhere
_REFUSED = (
    "trainings run on this machine, and what is timed beside them is wrong: pause them with "
    "`python -m benchmarks.papers.queue pause`, and let them go on with `resume`; or add "
    "--beside-trainings"
)


def _file(name: str) -> Path:
    return Path(os.environ.get(FOLDER) or tempfile.gettempdir()) / f"stepdial-trainings.{name}"


def _locked(kind: int) -> IO[str] | None:
    """The lock, or None where somebody has it in a way that excludes this one."""
    path = _file("lock")
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # it is another user's, and reading is enough for a lock
        opened = os.open(path, os.O_RDONLY)
    file = os.fdopen(opened)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


class Busy:
    """The mark that trainings run, and the file that asks them to pause."""

    def __init__(self) -> None:
        self.lock: IO[str] | None = None

    def mark(self) -> bool:
        """Whether the machine is marked now: not while a benchmark measures."""
        self.lock = self.lock or _locked(fcntl.LOCK_SH)
        return self.lock is not None

    def unmark(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    @property
    def paused(self) -> bool:
        return _file("pause").exists()

    def pause(self, wanted: bool) -> None:
        if wanted:
            _file("pause").touch()
        else:
            _file("pause").unlink(missing_ok=True)


@contextmanager
def quiet_machine(beside: bool) -> Iterator[None]:
    """Keep trainings from going on meanwhile; refuses where they run, or only says so."""
    lock = _locked(fcntl.LOCK_EX)
    if lock is None:
        if not beside:
            raise SystemExit(_REFUSED)
        print("WARNING: trainings run on this machine: times are wrong", file=sys.stderr)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


# The command line that all scripts share, and the bundles that it names.


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
    return [one for one in bundles_in(ZOO) if read_bundle(one).manifest.input.kind == "text"]


def bundles_in(folder: Path, names: str = "*") -> list[Path]:
    """The folders there that are bundles."""
    return sorted(path.parent for path in folder.glob(f"{names}/manifest.json"))


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


# Rounds: several things measured in turn, again and again, so that all meet the same noise. A
# machine that slows down for a while slows all of them; what is compared stays comparable.


KeyT = TypeVar("KeyT", bound=Hashable)
SampleT = TypeVar("SampleT")


def interleave(
    calls: Mapping[KeyT, Callable[[], SampleT]],
    seconds: float,
    least: int,
    most: int = 200,
) -> dict[KeyT, list[SampleT]]:
    """Call each once a round, in a shuffled order, for some seconds and at least so many rounds.

    The first call of each is not kept: it pays for what is done only once. Entry n of every list
    is from the same round.
    """
    for call in calls.values():
        call()
    kept: dict[KeyT, list[SampleT]] = {key: [] for key in calls}
    order = list(calls)
    shuffled = random.Random(0)
    begun_s, rounds = time.perf_counter(), 0
    while rounds < most and (rounds < least or time.perf_counter() - begun_s < seconds):
        shuffled.shuffle(order)
        for key in order:
            kept[key].append(calls[key]())
        rounds += 1
    return kept


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that this share of all is at most."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The middle of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


# The time of a call on the thread that makes it, on the processor and on the wall. On a busy
# machine the processor's time is the steadier one; on one at rest the two are the same, as long
# as the call uses no other thread.


class Times(NamedTuple):
    """Milliseconds of one call."""

    cpu_ms: float
    wall_ms: float


def clocked(call: Callable[[], object], least_ms: float) -> Times:
    """The mean of as many calls as take that long, and at least of one."""
    calls, cpu_s, wall_s = 0, time.thread_time(), time.perf_counter()
    while True:
        call()
        calls += 1
        spent_ms = (time.thread_time() - cpu_s) * 1000
        if spent_ms >= least_ms:
            return Times(spent_ms / calls, (time.perf_counter() - wall_s) * 1000 / calls)


# Keeps all cores from sleeping while something is timed. A virtual machine that has nothing to do
# gives its cores back, and gets them again milliseconds late; then what is timed is the host. A
# loop that every other process goes before keeps each core, and takes nothing from what is
# measured.


_LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@contextmanager
def awake() -> Iterator[bool]:
    """Whether the cores are kept; only Linux can."""
    if not hasattr(os, "SCHED_IDLE"):
        yield False
        return
    with ExitStack() as running:
        for core in os.sched_getaffinity(0):
            command = [sys.executable, "-c", _LOOP, str(core), str(os.getpid())]
            loop = running.enter_context(subprocess.Popen(command))
            running.callback(loop.kill)
        yield True
