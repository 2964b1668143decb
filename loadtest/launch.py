"""Starts Locust in a process of its own, since it patches sockets and threads of what imports it.

It deliberately knows nothing of what a test measures.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from loadtest.options import forwarded, shape_of
from loadtest.terms import parse_duration

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_MOST_AT_ONCE = 100  # a second: Locust warns that it cannot start more in time


def locust_command(options: argparse.Namespace, url: str) -> list[str]:
    """The command of one test."""
    is_open = shape_of(options) != "closed"
    users = options.workers or 1 if is_open else options.users
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), f"--host={url}"]
    command += [f"--users={users}", f"--spawn-rate={_spawn_rate(options, users)}"]
    command += forwarded(options)
    # Longer than a silent answer is waited for, so that silence is reported as such.
    patience_s = options.answer_timeout if options.drain is None else options.drain
    command.append(f"--stop-timeout={math.ceil(max(patience_s, options.answer_timeout)) + 1}")
    if not is_open:
        run_s = math.ceil(parse_duration(options.duration) + options.warm_up)
        command.append(f"--run-time={run_s}s")
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


def run(command: list[str], silent: bool = False) -> int:
    """The exit status of a test, which an interrupt ends early but not without its report."""
    output = subprocess.DEVNULL if silent else None
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal has interrupted Locust as well, which is finishing its report.
                if silent:
                    raise
                continue


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _spawn_rate(options: argparse.Namespace, users: int) -> float:
    chosen: float | None = options.spawn_rate
    return chosen or min(users, _MOST_AT_ONCE)
