"""Seconds from `make demo` in a fresh clone to the first answer.

    python -m benchmarks.first_answer

Clones the current commit into a temporary folder and measures twice: cold, with nothing installed
and no cache of packages used, and warm, when all is installed. It measures the commit, not the
work tree.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.client import Client, UnexpectedAnswer
from benchmarks.lab import (
    ROOT,
    Cell,
    Provenance,
    Result,
    Table,
    Target,
    parser,
    run,
)
from benchmarks.server import Tree, environment_without, free_ports, start
from benchmarks.texts import PARAGRAPHS

NAME = "first_answer"
HOST = "127.0.0.1"
COLD_LIMIT_S, WARM_LIMIT_S = 300.0, 10.0
_GIVE_UP_S, _STOP_S, _POLL_S = 1800.0, 45.0, 0.05


def main(arguments: Sequence[str]) -> int:
    made = parser(__doc__.partition("\n")[0])
    parsed = made.parse_args(arguments)
    if parsed.bundles:
        made.error("--bundles: the demo serves the zoo of the commit, and nothing else")
    return run(NAME, arguments, parsed, measure)


def measure(provenance: Provenance) -> Result:
    with tempfile.TemporaryDirectory(prefix="stepdial-") as folder:
        clone = Path(folder) / "stepdial"
        _git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
        cloned = _git("-C", str(clone), "rev-parse", "--short", "HEAD")
        cold_s = _first_answer_s(clone)
        warm_s = _first_answer_s(clone)
    rows: list[Sequence[Cell]] = [
        ["cold: nothing installed", cold_s],
        ["warm: the second start", warm_s],
    ]
    caption = (
        f"`make demo` in a clone of {cloned}, from the start of the command to having read the "
        "first answer."
    )
    targets = [
        Target("first answer, cold", cold_s, "<=", COLD_LIMIT_S, "s"),
        Target("first answer, warm", warm_s, "<=", WARM_LIMIT_S, "s"),
    ]
    return provenance.result(
        NAME,
        "From a clean clone to the first answer",
        "Everything is installed on the way, as on a machine that has only Python, make and git.",
        [Table(caption, ("start", "seconds"), rows)],
        targets,
    )


def _first_answer_s(clone: Path) -> float:
    """Start the demo, ask until it answers, stop it."""
    (port,) = free_ports(1)
    log = clone.parent / "demo.log"
    command = ["make", "-C", str(clone), "demo", f"HOST={HOST}", f"PORT={port}"]
    begun_s = time.perf_counter()
    demo = Tree(start(command, _environment(), log))
    try:
        while not _answered(port):
            if demo.process.poll() is not None:
                raise SystemExit(f"make demo ended before it answered:\n{_tail(log)}")
            if time.perf_counter() - begun_s > _GIVE_UP_S:
                raise SystemExit(f"no answer after {_GIVE_UP_S:g} s:\n{_tail(log)}")
            time.sleep(_POLL_S)
        return time.perf_counter() - begun_s
    finally:
        demo.end(_STOP_S)


def _answered(port: int) -> bool:
    """Ask what the README asks first; whether there was an answer."""
    with Client(HOST, port) as client:
        try:
            client.post("/v1/classify", {"model": "sentiment", "input": PARAGRAPHS[0]})
        except (OSError, UnexpectedAnswer):
            return False
    return True


def _environment() -> dict[str, str]:
    """That of a new shell: nothing of this virtual environment, of make, or of our settings."""
    left_out = ("STEPDIAL_", "MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHON")
    kept = environment_without(*left_out)
    if "VIRTUAL_ENV" in os.environ:
        own = os.path.join(os.environ["VIRTUAL_ENV"], "bin")
        parts = kept.get("PATH", os.defpath).split(os.pathsep)
        kept["PATH"] = os.pathsep.join(part for part in parts if part != own)
    return kept | {"PIP_NO_CACHE_DIR": "1"}


def _git(*arguments: str) -> str:
    ended = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"git {arguments[0]} failed: {ended.stderr.strip()}")
    return ended.stdout.strip()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
