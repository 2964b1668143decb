"""An environment of each server's own, with pinned packages, in a folder that is kept.

Knows venv and pip; deliberately nothing of what is installed.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab import ROOT

_STAMP = "installed.txt"
_INSTALL_S = 900


class NotInstalled(Exception):
    """An environment could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Environments:
    """All of them, each a folder of this one."""

    folder: Path

    def __post_init__(self) -> None:
        if self.folder.resolve().is_relative_to(ROOT):
            raise NotInstalled(
                f"--environments {self.folder} is inside the repository: name a folder elsewhere"
            )

    def python(self, name: str, packages: tuple[str, ...], interpreter: Path) -> Path:
        """The interpreter of one that has these packages; it is made if it is not there."""
        folder = self.folder / name.lower()
        python, stamp = folder / "bin" / "python", folder / _STAMP
        wanted = "\n".join((str(interpreter), *packages))
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return python
        if not interpreter.exists():
            raise NotInstalled(f"it needs {interpreter}, which is not on this machine")
        print(f"installing {name}: {' '.join(packages)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        # Ours installs for it, so that the interpreter need not bring a pip.
        _run(str(interpreter), "-m", "venv", "--without-pip", str(folder))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
        _run(*pip, "install", "--quiet", *packages)
        stamp.write_text(wanted, encoding="utf-8")
        return python


def default_folder() -> Path:
    """Where programs of this user keep what they can make again."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "stepdial" / "peers"


def _run(*command: str) -> None:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"installing took more than {_INSTALL_S} s") from None
    if ended.returncode:
        told = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        lines = told or ended.stderr.strip().splitlines() or ["no message"]
        raise NotInstalled(f"it could not be installed: {lines[-1]}")
