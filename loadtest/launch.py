"""Starts Locust in a process of its own, because importing it patches sockets and threads."""

import argparse
import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.options import duration_s_of, forwarded, shape_of
from loadtest.output import say

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_OF_PARENTS_END = 1  # prctl's PR_SET_PDEATHSIG
_MOST_AT_ONCE = 100  # a second: Locust warns that it cannot start more in time


def locust_command(options: argparse.Namespace, url: str) -> list[str]:
    """The command of one test."""
    is_open = shape_of(options) != "closed"
    users = options.workers or 1 if is_open else options.users
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), f"--host={url}"]
    command += [f"--users={users}", f"--spawn-rate={_spawn_rate(options, users)}"]
    command += forwarded(options)
    # Longer than a silent answer is waited for, so that silence is reported as such. An open loop
    # keeps --drain by itself.
    patience_s = options.answer_timeout + 1
    if options.drain is not None:
        patience_s = max(options.drain + 1, patience_s) if is_open else options.drain
    command.append(f"--stop-timeout={math.ceil(patience_s)}")
    run_s = duration_s_of(options) + options.warm_up
    if not is_open and math.isfinite(run_s):
        command.append(f"--run-time={math.ceil(run_s)}s")
    if options.workers:
        command += [f"--processes={options.workers}", f"--expect-workers={options.workers}"]
        # Locust's own port is one for all tests of a machine, and open to other machines.
        port = _free_port()
        command += ["--master-bind-host=127.0.0.1", f"--master-bind-port={port}"]
        command.append(f"--master-port={port}")
    if options.web:
        return [*command, "--web-host=127.0.0.1", f"--web-port={options.web_port}"]
    # Naming a file for Locust's own statistics also keeps it from printing them.
    quiet = ["--only-summary", "--loglevel=WARNING", f"--json-file={os.devnull}"]
    return [*command, "--headless", *quiet]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a test ended: its exit status, and whether somebody wanted it to end before."""

    status: int
    interrupted: bool


def run(command: list[str], silent: bool = False) -> Ending:
    """Run a test, which a signal ends early but not without its report.

    Locust has a session of its own: a terminal would interrupt its workers beside it, with
    whatever they had not told yet. What it may leave behind when it is killed ends with it.
    """
    output = subprocess.DEVNULL if silent else None
    wanted: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def end(number: int, _: object) -> None:
        wanted.append(number)
        for process in started:
            process.terminate()

    # One that is ignored, as SIGHUP by `nohup`, stays so.
    heeded = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,
            preexec_fn=partial(_end_with, os.getpid()),
        )
        started.append(process)
        if wanted:
            process.terminate()
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status < 0:
        say(f"The test was ended by {signal.Signals(-status).name}, without a report.", sys.stderr)
        status = 128 - status
    return Ending(status, bool(wanted))


def _end_with(parent: int) -> None:
    """In a new process before it becomes Locust: end when this one is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_END, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before that was asked
            os._exit(1)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _spawn_rate(options: argparse.Namespace, users: int) -> float:
    chosen: float | None = options.spawn_rate
    return chosen or min(users, _MOST_AT_ONCE)
