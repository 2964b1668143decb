"""What a figure was measured on: the processor, its memory, the software, the commit, the date.

Knows the machine and the work tree; deliberately nothing of what is measured. It names no host,
user or folder, so that results can be published as they are.
"""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve.runtime.session import usable_cores

ROOT = Path(__file__).resolve().parent.parent
# What the benchmarks write themselves does not make the measured code another one.
_OWN_OUTPUTS = (
    "benchmarks/results",
    "benchmarks/RESULTS.md",
    "benchmarks/papers/measured",
    "benchmarks/papers/screened",
    "docs/results",
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
        cpu=_cpu_name(),
        cores=usable_cores(),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        onnxruntime=_version("onnxruntime"),
        load=round(os.getloadavg()[0], 2),
    )


def commit(root: Path = ROOT) -> str:
    """The commit that is measured, with -dirty when the work tree differs from it."""
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head is None:
        return "none"
    excluded = [f":(exclude){path}" for path in _OWN_OUTPUTS]
    changed = _git(root, "status", "--porcelain", "--", ".", *excluded)
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


def _git(root: Path, *arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
