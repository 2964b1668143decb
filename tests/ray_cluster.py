"""Stepdial on a Ray cluster of several nodes on this machine, as a process of its own."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]

_START_S, _STOP_S, _BEAT_S = 240.0, 60.0, 0.1
_URL = re.compile(r"^on (http://[\d.]+:\d+) through Ray Serve.*Ctrl-C ends it", re.MULTILINE)
_NODE = re.compile(r"^node \d+: process (\d+)$", re.MULTILINE)
_LOG = re.compile(r"/replica_stepdial_Replica_(\w+)\.log$")
_REPLICA = "ServeReplica:stepdial:Replica"


@dataclass(frozen=True, slots=True)
class Node:
    """A node that runs replicas."""

    raylet: psutil.Process

    def replicas(self) -> list[psutil.Process]:
        """Processes of replicas on it."""
        return [one for one in self._processes() if _is_replica(one)]

    def replica_names(self) -> set[str]:
        """The replicas on it, as they sign their answers: after the logs that they write."""
        paths = [file.path for one in self.replicas() for file in one.open_files()]
        return {found for path in paths for found in _LOG.findall(path)}

    def kill(self) -> None:
        """End all of it at once, as if its power were cut."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self.raylet, *self.raylet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that serves."""

    url: str
    log: Path
    process: psutil.Process

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://").partition(":")[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def nodes(self) -> list[Node]:
        """Those that live, oldest first."""
        found = []
        for number in _NODE.findall(_text(self.log)):
            with suppress(psutil.NoSuchProcess):
                raylet = psutil.Process(int(number))
                if raylet.status() != psutil.STATUS_ZOMBIE:
                    found.append(Node(raylet))
        return found


@contextmanager
def running_cluster(
    bundles: Sequence[Path], *flags: str, module: str = "deploy.ray.local"
) -> Iterator[RayCluster]:
    """A cluster that serves these bundles; ended afterwards, with all that it started."""
    command = [sys.executable, "-m", module, *map(str, bundles), "--port", "0", *flags]
    own = {name: text for name, text in os.environ.items() if not name.startswith("STEPDIAL_")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ray.log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=own | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield RayCluster(_address(process, log), log, psutil.Process(process.pid))
        finally:
            _stop(process)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        ended = process.poll()
        found = _URL.search(_text(log))
        if ended is not None:
            raise RuntimeError(f"the cluster ended with status {ended}:\n{_text(log)}")
        if found:
            return found.group(1)
        time.sleep(_BEAT_S)
    raise RuntimeError(f"the cluster did not start within {_START_S:g} s:\n{_text(log)}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    started = [] if process.poll() is not None else psutil.Process(process.pid).children(True)
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in started:
        with suppress(psutil.NoSuchProcess):
            left.kill()


def _is_replica(process: psutil.Process) -> bool:
    try:
        return any(_REPLICA in word for word in process.cmdline())
    except psutil.Error:
        return False


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")
