"""The real server, as a process of its own on a free port, with what it takes of memory."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.lab import ROOT

READY_LINE = "Press Ctrl-C to stop."  # the last of what a server says when all is well
_START_S, _STOP_S = 60.0, 45.0
_COMPLAINT = re.compile(r"WARNING|ERROR|CRITICAL|Traceback")
_URL = re.compile(r"^on http://([\d.]+):(\d+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process, in bytes; `pss` counts shared pages in part, `peak` is the largest `rss`.

    `anonymous` is what no file stands behind, so that the system cannot drop it.
    """

    rss: int
    pss: int
    anonymous: int
    peak: int
    swapped: int


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs."""

    pid: int
    host: str
    port: int
    log: Path

    def memory(self) -> Memory:
        """What it takes now."""
        return process_memory(self.pid)

    def logged(self) -> str:
        """Everything that it wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def complaints(self) -> list[str]:
        """The lines of that which warn or tell of an error."""
        return [line for line in self.logged().splitlines() if _COMPLAINT.search(line)]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def running_server(bundles: Sequence[Path], *flags: str, **variables: str) -> Iterator[Server]:
    """A server of these bundles, with default settings but for the flags; ended afterwards.

    The variables are those of its environment, beside our own.
    """
    own = {name: text for name, text in os.environ.items() if not name.startswith("STEPDIAL_")}
    folders = [str(folder.resolve()) for folder in bundles]
    command = [sys.executable, "-m", "serve", *folders, "--port", "0", *flags]
    with started(command, own | variables) as server:
        yield server


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[Server]:
    """What this command serves, once it says where; ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w", encoding="utf-8") as output:
            process = _start(command, environment, output)
        try:
            host, port = _address(process, log)
            yield Server(process.pid, host, port, log)
        finally:
            _stop(process)


def process_memory(pid: int | str) -> Memory:
    """The memory of a process, as the kernel counts it."""
    status = _fields(Path(f"/proc/{pid}/status"))
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return Memory(
        rss=status["VmRSS"],
        pss=rollup["Pss"],
        anonymous=rollup["Anonymous"],
        peak=status["VmHWM"],
        swapped=status["VmSwap"],
    )


def _fields(path: Path) -> dict[str, int]:
    """The sizes that a file of /proc lists, in bytes."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: memory can be measured on Linux only")
    found = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(encoding="ascii"), re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in found}


def _start(
    command: list[str], environment: dict[str, str], output: IO[str]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
    )


def _address(process: "subprocess.Popen[bytes]", log: Path) -> tuple[str, int]:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        ended = process.poll()
        text = log.read_text(encoding="utf-8", errors="replace")
        found = _URL.search(text)
        if found and READY_LINE in text and ended is None:
            return found.group(1), int(found.group(2))
        if ended is not None:
            raise SystemExit(f"the server ended with status {ended}:\n{text}")
        time.sleep(0.02)
    raise SystemExit(f"the server did not start within {_START_S:g} s")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
