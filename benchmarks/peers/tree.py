"""A server as the tree of processes that it is: started on its core, counted, and ended.

Knows processes; deliberately nothing of what is served.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.server import process_memory

_POLL_S = 0.01
_KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Those of the server, and those of the clients."""

    server: frozenset[int]
    clients: frozenset[int]

    @classmethod
    def of_machine(cls) -> Self:
        """The first usable core for the server, the others for the clients, if there are any."""
        first, *others = sorted(os.sched_getaffinity(0))
        return cls(frozenset({first}), frozenset(others or {first}))

    @property
    def apart(self) -> bool:
        return not self.server & self.clients

    @contextmanager
    def of_clients(self) -> Iterator[None]:
        """This thread, and what it starts, stays on those of the clients meanwhile."""
        with _only(self.clients):
            yield

    @contextmanager
    def of_server(self) -> Iterator[None]:
        """This thread, and what it starts, stays on that of the server meanwhile."""
        with _only(self.server):
            yield


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
        ticks = 0
        for pid in self.members():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

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


@contextmanager
def _only(cores: frozenset[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
