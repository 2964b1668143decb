"""Python processes that start at once: forked from one that has imported what they run.

Imports are most of what a server with tiny models, or a short training, costs. What runs here is a
process of its own as ever, which ends as the interpreter ends; only what a start reads before
`main` is that of the process it was forked from.

    python -m tests.warm NAME PACKAGE.MODULE...    waits for jobs, and runs `main` of the first

The name is that of a socket without a file, as Linux has.
"""

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from subprocess import Popen

    Process = Popen[str]
else:
    Process = subprocess.Popen

ROOT = Path(__file__).resolve().parent.parent
_MOST_BYTES = 2**17
# Where there is no Python to import: passes on what it has, and ends as the job does.
CLIENT = """import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as job:
    job.connect("\\0" + sys.argv[1])
    told = [sys.argv[2:], dict(os.environ), os.getcwd()]
    socket.send_fds(job, [json.dumps(told).encode()], [0, 1, 2])
    job.recv(64)
    sys.exit(int(job.recv(64)) & 255)
"""


class ForkServer:
    """A process to fork from. It ends when this one does."""

    def __init__(self, environment: Mapping[str, str], *modules: str) -> None:
        self.name = f"stepdial-{uuid4()}"
        command = [sys.executable, "-m", "tests.warm", self.name, *modules]
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"warm\n"
        process.stdout.close()
        atexit.register(process.wait)
        atexit.register(process.stdin.close)  # at which it ends

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: int, err: int
    ) -> "Forked":
        """Run `main`; what it prints goes to these files."""
        job = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job.connect(f"\0{self.name}")
        told = [list(arguments), dict(environment), os.getcwd()]
        with open(os.devnull, "rb") as nothing:
            socket.send_fds(job, [json.dumps(told).encode()], [nothing.fileno(), out, err])
        return Forked(job)


class Forked(Process):
    """As much of `Popen` as tests use, of a process that another has forked."""

    def __init__(self, job: socket.socket) -> None:
        self._job = job
        self.pid = int(job.recv(64))
        self.returncode = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        ended = self._ended(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return ended

    def _ended(self, patience_s: float | None) -> int | None:
        if self.returncode is None and select([self._job], [], [], patience_s)[0]:
            self.returncode = int(self._job.recv(64))
            self._job.close()
        return self.returncode


def _wait_for_job(name: str) -> list[str]:
    """Fork for every job; returns, in the process that runs one, the arguments of its `main`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for those that wait
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        print("warm", flush=True)
        while sys.stdin not in select([listener, sys.stdin], [], [])[0]:
            job, _ = listener.accept()
            if os.fork() == 0:
                break
            job.close()
        else:
            os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, files, _, _ = socket.recv_fds(job, _MOST_BYTES, 3)
    child = os.fork()
    if child:
        job.send(str(child).encode())
        job.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    job.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments, environment, folder = json.loads(told)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return list(arguments)


if __name__ == "__main__":
    entry, *_ = [importlib.import_module(name) for name in sys.argv[2:]]
    sys.argv[1:] = _wait_for_job(sys.argv[1])
    sys.exit(entry.main(sys.argv[1:]))
