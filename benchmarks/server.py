"""The real server, as a process of its own on a free port, with what it takes of memory."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

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

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

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
    folders = [str(folder.resolve()) for folder in bundles]
    with started("serve", *folders, "--port", "0", *flags, variables=variables) as server:
        yield server


@contextmanager
def running_stub(folder: Path, call_ms: float, row_ms: float) -> Iterator[Server]:
    """A server whose model waits so long a call and a row (benchmarks.stub_server)."""
    flags = ("--call-ms", str(call_ms), "--row-ms", str(row_ms))
    with started("benchmarks.stub_server", str(folder), *flags) as server:
        yield server


@contextmanager
def started(
    module: str, *arguments: str, cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """What `python -m module` serves, once it says where; ended afterwards.

    Settings of Stepdial in our own environment are not passed on.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = environment_without("STEPDIAL_") | dict(variables or {})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            host, port = _address(process, log)
            yield Server(process.pid, host, port, log)
        finally:
            _stop(process)


def environment_without(*prefixes: str) -> dict[str, str]:
    """Our own, less the variables whose names begin like that."""
    return {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}


def process_cpu_s(pid: int) -> float:
    """The processor time that a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


# A server of any kind, as the tree of processes that it is.


_POLL_S = 0.01
_KILL_S = 10.0


@dataclass(slots=True)
class Tree:
    """A process and everything that it started, also what outlived what started it."""

    process: "subprocess.Popen[bytes]"
    _seen: dict[int, str] = field(default_factory=dict)  # by process, when that began

    def members(self) -> list[int]:
        """Those that live."""
        self.process.poll()  # else it would stay as a zombie
        children: dict[int, list[int]] = {}
        began: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, parent, *rest = path.read_text("utf-8").rpartition(")")[2].split()
                if state != "Z":
                    pid = int(path.parent.name)
                    children.setdefault(int(parent), []).append(pid)
                    began[pid] = rest[17]
        known = [self.process.pid, *(pid for pid, at in self._seen.items() if began.get(pid) == at)]
        found: set[int] = set()
        while known:
            pid = known.pop()
            if pid in began and pid not in found:
                found.add(pid)
                known += children.get(pid, [])
        self._seen |= {pid: began[pid] for pid in found}
        return sorted(found)

    def memory_mb(self) -> tuple[float, float]:
        """RSS and PSS of all; the first counts what they share again and again."""
        sizes = []
        for pid in self.members():
            with suppress(OSError):  # it has ended since
                sizes.append(process_memory(pid))
        return sum(one.rss for one in sizes) / 1e6, sum(one.pss for one in sizes) / 1e6

    def cpu_s(self) -> float:
        """The processor time that those that live have taken."""
        spent_s = 0.0
        for pid in self.members():
            with suppress(OSError):  # it has ended since
                spent_s += process_cpu_s(pid)
        return spent_s

    def gone_s(self, patience_s: float) -> float | None:
        """Wait until no process is left, and say how long; None if some stay."""
        begun_s = time.perf_counter()
        while self.members():
            if time.perf_counter() - begun_s > patience_s:
                return None
            time.sleep(_POLL_S)
        return time.perf_counter() - begun_s

    def end(self, patience_s: float = 15.0) -> None:
        """Ask it to end, then make it."""
        self.members()
        self.process.terminate()
        # What has outlived it was told by nobody.
        if self.process.poll() is not None or self.gone_s(patience_s) is None:
            for pid in self.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        # One that is killed lives until the kernel has taken it apart.
        if self.gone_s(_KILL_S) is None:
            raise TimeoutError(f"cannot be killed: {self.members()}")
        # Its first thread may have gone before the others.
        self.process.wait(_KILL_S)


def start(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    """A process in a session of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=log.parent,  # some leave files where they were started
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
